"""SharedParts: what the steps of all GPUs share: their classes, and where they leave results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.experts import choices_shape
from runtime.engine.gpu.latent_launches import most_tokens
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.share_opening import ShareOpening
from runtime.engine.gpu.step_graph import logits_stride
from runtime.engine.gpu.step_shape import LARGEST_BATCH, StepShapes
from runtime.errors import DeviceUnavailable
from runtime.models.spec import ModelSpec

LARGEST_SHARED_BATCH = 512
"""Tokens of a step whose missed experts the CPU computes: so many share the read of a weight, and
what they exchange stays in the tens of megabytes."""

CHOICES_ALIGN = 4
"""The choices of a GPU's layers begin at multiples of so many numbers: they are copied 16 bytes at
a time."""


@dataclass(frozen=True)
class SharedParts:
    """shapes         classes of steps
    first_choices  where each GPU's choices of experts begin among all; None: it misses none
    results        what the host reads
    """

    shapes: StepShapes
    first_choices: list[int | None]
    results: Results


def shared_parts(
    spec: ModelSpec,
    limits: ExecutorLimits,
    shares: Sequence[ShareOpening],
    missing: Sequence[ShareOpening],
    resources: ExitStack,
) -> SharedParts:
    """Those of a model on these GPUs, of which some miss experts; `resources` closes the results.

    Raises: DeviceUnavailable, PinningFailed, CudaError.
    """
    shapes = _missing_shapes(spec, limits, missing) if missing else whole_shapes(spec, limits)
    firsts, n_choices = _choices(shares, missing, shapes)
    n_outputs = max(shape.n_outputs for shape in shapes.largest())
    stride = logits_stride(limits.n_vocab)
    results = Results(shares[-1].device, n_outputs, stride, max(n_choices, CHOICES_ALIGN))
    resources.callback(results.close)
    return SharedParts(shapes, firsts, results)


def whole_shapes(spec: ModelSpec, limits: ExecutorLimits) -> StepShapes:
    """Of a model whose experts are all on GPUs."""
    return StepShapes(limits, most_tokens(spec, LARGEST_BATCH))


def _missing_shapes(
    spec: ModelSpec, limits: ExecutorLimits, missing: Sequence[ShareOpening]
) -> StepShapes:
    """Of steps that miss experts: the CPU computes these, or long prompts fetch them."""
    if missing[0].experts.fetches is None:
        return StepShapes(limits, most_tokens(spec, LARGEST_SHARED_BATCH))
    from runtime.experts.fetched_experts import FETCHED_TOKENS

    return StepShapes(limits, most_tokens(spec, LARGEST_BATCH), fetch_tokens=FETCHED_TOKENS)


def _choices(
    shares: Sequence[ShareOpening], missing: Sequence[ShareOpening], shapes: StepShapes
) -> tuple[list[int | None], int]:
    """Where each GPU's choices begin, and the end of all.  Raises: DeviceUnavailable."""
    firsts: list[int | None] = []
    end, used = 0, set()
    for share in shares:
        firsts.append(end if share in missing else None)
        if share in missing:
            size = choices_shape(share.model.spec, shapes.max_batch)
            used.add(size[2])
            end += -(-int(np.prod(size)) // CHOICES_ALIGN) * CHOICES_ALIGN
    if len(used) > 1:
        raise DeviceUnavailable("layers that use different numbers of experts, on several GPUs")
    return firsts, end
