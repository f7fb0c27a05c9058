"""The table of architectures: `general.architecture` -> the function that builds the spec."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models import (
    deepseek2,
    glm4moe,
    glm5_next,
    gpt_oss,
    llama,
    mimo2,
    olmoe,
    qwen2moe,
    qwen3moe,
    qwen4exp,
    qwen35,
    qwen35moe,
)
from runtime.models.builder import SpecBuilder
from runtime.models.spec import ModelSpec

ARCHITECTURES: dict[str, Callable[[SpecBuilder], ModelSpec]] = {
    "deepseek2": deepseek2.build,
    "glm4moe": glm4moe.build,
    "glm5-next": glm5_next.build,
    "glm5next": glm5_next.build,
    "gpt-oss": gpt_oss.build,
    "llama": llama.build,
    "mimo2": mimo2.build,
    "olmoe": olmoe.build,
    "qwen2moe": qwen2moe.build,
    "qwen3moe": qwen3moe.build,
    "qwen35": qwen35.build,
    "qwen35moe": qwen35moe.build,
    "qwen4exp": qwen4exp.build,
}
