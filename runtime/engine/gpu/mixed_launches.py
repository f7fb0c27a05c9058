"""Mixed streams of a few rows as launches whose blocks share a row: see `mix_streams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ops.gpu.streams import (
    MIX_SHARED_BYTES,
    N_MIX,
    N_SUMS,
    RETURN_MIXED,
    RETURN_NOTHING,
    mix_grid,
    mix_streams,
    mixed_input,
    mixed_input_grid,
)
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.gpu.row_launches import NOTHING_PENDING
from runtime.engine.step import StepKind
from runtime.models.streams import SinkhornStreams

MEAN_SCALE = 4.0
"""The square of what half of every stream makes of their mean: 2."""


@dataclass(frozen=True)
class Mixed:
    """A mix's results, f32[n_tokens, 24] at an address, from which what returns is computed."""

    mix: int
    streams: SinkhornStreams


def takes_few_mixed(parts: PlanParts) -> bool:
    """Whether the kernels take the mixes of a step: not those of prompts, which have many rows."""
    model = parts.model
    layers = model.spec.layers
    found = (s for layer in layers for s in (layer.mixer_streams, layer.feed_forward_streams))
    mixes = [s.mix for s in found if isinstance(s, SinkhornStreams)]
    plain = all(mix.bias is None and mix.scale is None for mix in mixes)
    numbers = all(model.weights[mix.weight].format.name == "F32" for mix in mixes)
    return parts.shape.kind is StepKind.DECODE and plain and numbers


def add_mixed(
    parts: PlanParts,
    name: str,
    x: int,
    norm: int,
    streams: SinkhornStreams,
    before: Mixed | None,
    returning: int,
    pending: Mapping[str, int],
    forms: Mapping[str, int],
) -> Mixed:
    """Return the last block's result to the streams at x, write the next one's input as `forms`.

    norm       address of the input's weights
    before     how it returns; None: as `returning` says
    """
    how = RETURN_MIXED if before else returning
    sums = _add_sums(parts, f"{name}_streams", x, streams, before, how, pending)
    mix = parts.room.place("stream mix", 4 * parts.n_tokens * N_MIX)
    vector = parts.weights.vector
    fields = {"base": vector(streams.base), "scales": vector(streams.scale), "weight": norm}
    numbers = {"epsilon": streams.epsilon, "eps": parts.model.spec.eps}
    _add_input(parts, f"{name}_input", x, {**fields, **numbers, **forms, "sums": sums, "mix": mix})
    return Mixed(mix, streams)


def add_mean_of_mixed(
    parts: PlanParts,
    name: str,
    x: int,
    norm: int,
    before: Mixed,
    pending: Mapping[str, int],
    forms: Mapping[str, int],
) -> None:
    """Return the last result; the norm of the streams' mean as `forms`.

    A mix of zeros takes half of every stream, twice their mean, and a norm does not mind: its
    epsilon is four times as large.  The product goes nowhere.
    """
    sums = _add_sums(parts, f"{name}_streams", x, before.streams, before, RETURN_MIXED, pending)
    zeros = parts.constants.place(np.zeros(N_MIX, np.float32))
    mix = parts.room.place("stream mix", 4 * parts.n_tokens * N_MIX)
    fields = {"base": zeros, "scales": zeros, "weight": norm, "sums": sums, "mix": mix}
    numbers = {"epsilon": 0.0, "eps": MEAN_SCALE * parts.model.spec.eps}
    _add_input(parts, name, x, {**fields, **numbers, **forms})


def _add_sums(
    parts: PlanParts,
    name: str,
    x: int,
    streams: SinkhornStreams,
    before: Mixed | None,
    returning: int,
    pending: Mapping[str, int],
) -> int:
    """Address of the sums for the mix of `streams`."""
    n, n_rows, vector = parts.model.spec.n_embd, parts.n_tokens, parts.weights.vector
    grid, last = mix_grid(n, n_rows), before or Mixed(0, streams)
    sums = parts.room.place("stream sums", 4 * n_rows * grid[0] * N_SUMS)
    parts.plan.add(
        name,
        mix_streams(overlapped=parts.overlapped),
        grid,
        {
            **NOTHING_PENDING,
            **pending,
            "x": x,
            "n": n,
            "count": parts.token_count,
            "returning": returning if pending else RETURN_NOTHING,
            "mix": last.mix,
            "base": vector(last.streams.base),
            "scales": vector(last.streams.scale),
            "matrix": parts.weights.matrix(streams.mix.weight),
            "sums": sums,
            "n_iterations": last.streams.n_iterations,
            "epsilon": last.streams.epsilon,
        },
        shared_bytes=MIX_SHARED_BYTES,
        overlapped=parts.overlapped,
    )
    return sums


def _add_input(parts: PlanParts, name: str, x: int, fields: Mapping[str, float]) -> None:
    """A block's input from the sums."""
    n, n_rows = parts.model.spec.n_embd, parts.n_tokens
    parts.plan.add(
        name,
        mixed_input(overlapped=parts.overlapped),
        mixed_input_grid(n, n_rows),
        {
            **fields,
            "x": x,
            "n": n,
            "count": parts.token_count,
            "n_sums": mix_grid(n, n_rows)[0],
        },
        overlapped=parts.overlapped,
    )
