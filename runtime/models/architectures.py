"""The table of architectures: `general.architecture` -> the function that builds the spec."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models import llama, olmoe, qwen2moe, qwen3moe
from runtime.models.builder import SpecBuilder
from runtime.models.spec import ModelSpec

ARCHITECTURES: dict[str, Callable[[SpecBuilder], ModelSpec]] = {
    "llama": llama.build,
    "olmoe": olmoe.build,
    "qwen2moe": qwen2moe.build,
    "qwen3moe": qwen3moe.build,
}
