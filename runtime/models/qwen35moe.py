"""Qwen 3.5 to 3.8 with experts: the layers of `qwen35`, a gated shared expert in each."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.qwen35 import hybrid
from runtime.models.qwen_hybrid import experts
from runtime.models.spec import ModelSpec


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `qwen35moe` file."""
    return hybrid(builder, lambda layer: experts(builder, layer))
