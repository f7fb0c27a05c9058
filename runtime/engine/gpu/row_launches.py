"""The launches between products: residual stream, norms, activation records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.gpu.norm import norm
from ops.gpu.quantize import BLOCK_VALUES, KINDS, quantize
from runtime.engine.gpu.plan_parts import (
    DeviceRows,
    PlanParts,
    record_bytes,
    record_fields,
)

NOTHING_PENDING: dict[str, int] = {
    "delta": 0,
    "expert_out": 0,
    "slots": 0,
    "weights": 0,
    "n_used": 0,
    "shared": 0,
    "shared_weights": 0,
}
"""The arguments of `ops.gpu.norm` that say what is added to the residual stream first."""

MAX_GRID_ROWS = 1 << 15
"""Rows of one launch: the second number of a grid ends at 65535."""


@dataclass(frozen=True)
class NormEntry:
    """A norm that the launch behind it has to do: x_to = x + delta, and its norm.

    x, x_to  addresses of f32[n_tokens, n_embd], not the same
    delta    the same; 0: there is none, and x_to is not written
    norm     name of the norm's weights
    """

    x: int
    x_to: int
    delta: int
    norm: str


def add_norm(
    parts: PlanParts,
    name: str,
    weight: str | None,
    x: int,
    out: DeviceRows,
    pending: Mapping[str, int],
    *,
    outputs: bool = False,
    x_stride: int | None = None,
) -> None:
    """x += pending; then the rows' RMS norm in every form that `out` is wanted in.

    weight    None: x is updated, and nothing else
    x         address of the residual stream, f32[n_tokens, n_embd]
    outputs   the rows are those of the step's outputs, not all tokens
    x_stride  values from a row of x to the next; None: a row's own
    """
    n = out.width
    wanted = out.wanted if weight is not None else (lambda kind: 0)
    parts.plan.add(
        name,
        norm(n, overlapped=parts.overlapped),
        (parts.shape.n_outputs if outputs else parts.n_tokens,),
        {
            **NOTHING_PENDING,
            **pending,
            "x": x,
            "x_stride": n if x_stride is None else x_stride,
            "n": n,
            "count": parts.output_count if outputs else parts.token_count,
            "tokens": parts.control("output_tokens") if outputs else 0,
            "weight": parts.weights.vector(weight),
            "out_f32": wanted("f32"),
            "q8_256": wanted("q8_256"),
            "q8_32": wanted("q8_32"),
            "eps": parts.model.spec.eps,
        },
        overlapped=parts.overlapped,
    )


def add_records(parts: PlanParts, name: str, x: int, out: DeviceRows) -> None:
    """The activation records that `out` is wanted in, of its f32 rows at x."""
    for kind in KINDS:
        if not out.wanted(kind):
            continue
        for first in range(0, out.n_rows, MAX_GRID_ROWS):
            n_rows = min(MAX_GRID_ROWS, out.n_rows - first)
            parts.plan.add(
                f"{name}.{kind}",
                quantize(kind, overlapped=parts.overlapped),
                (-(-out.width // BLOCK_VALUES), n_rows),
                {
                    "x": x + first * 4 * out.width,
                    "records": out.wanted(kind) + first * record_bytes(kind, out.width),
                    "n": out.width,
                    **record_fields(kind, out.width),
                },
                overlapped=parts.overlapped,
            )
