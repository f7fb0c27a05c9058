"""Prompts that kernels for single tokens read: what their users should know, in words."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.step import StepKind

PROMPT_TOKENS = 64
"""Of a step that is meant to read a prompt quickly."""

ATTENTION = (
    "the tokens of prompts attend one by one: the kernels for prompts do not take these heads with "
    "these cache types, or do not fit a block's shared memory; f16 for both may help"
)

RECURRENCE = (
    "the tokens of prompts go through delta nets one by one: the kernel for chunks of them does "
    "not fit a block's shared memory"
)


def slow_launches(shape: StepShape, launches: list[PlannedLaunch]) -> Iterator[str]:
    """Why a step reads its prompt more slowly than others, a text a launch.

    Where an indexer chooses from keys with values of their own, each token has its own, so that it
    attends alone is no such reason; nor is it in shorter texts, whose tokens attend alone as well,
    so that bits do not depend on how a prompt is cut.
    """
    if shape.kind is not StepKind.PREFILL or shape.n_tokens < PROMPT_TOKENS:
        return
    alone = ("attention", "latent_decode")
    latent, indexed = _layers(launches, "latent_heads"), _layers(launches, "index_keys")
    for launch in launches:
        if launch.kernel.entry in alone and _layer(launch) not in indexed - latent:
            yield ATTENTION
        if launch.kernel.entry == "delta_net":
            yield RECURRENCE


def _layers(launches: list[PlannedLaunch], entry: str) -> set[str]:
    """Layers that launch such a kernel."""
    return {_layer(launch) for launch in launches if launch.kernel.entry == entry}


def _layer(launch: PlannedLaunch) -> str:
    return launch.name.partition(".")[0]
