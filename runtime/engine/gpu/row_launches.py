"""The launches between products: residual stream, norms, activation records."""

from __future__ import annotations

from collections.abc import Mapping

from ops.gpu.norm import norm
from ops.gpu.quantize import BLOCK_VALUES, KINDS, quantize
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_fields

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


def add_norm(
    parts: PlanParts,
    name: str,
    weight: str | None,
    x: int,
    out: DeviceRows,
    pending: Mapping[str, int],
    *,
    outputs: bool = False,
) -> None:
    """x += pending; then the rows' RMS norm in every form that `out` is wanted in.

    weight   None: x is updated, and nothing else
    x        address of the residual stream, f32[n_tokens, n_embd]
    outputs  the rows are those of the step's outputs, not all tokens
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
            "x_stride": n,
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
        parts.plan.add(
            f"{name}.{kind}",
            quantize(kind),
            (-(-out.width // BLOCK_VALUES), out.n_rows),
            {
                "x": x,
                "records": out.wanted(kind),
                "n": out.width,
                **record_fields(kind, out.width),
            },
        )
