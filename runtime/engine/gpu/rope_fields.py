"""The arguments of kernels that turn queries and keys by their positions."""

from __future__ import annotations

from ops.gpu.heads import ROPE_NEOX, ROPE_NONE, ROPE_NORM, turns_of
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.models.rope import RopePairing, RopeSpec, rope_frequencies
from runtime.models.vectors import rope_factors

ROPE_KINDS = {RopePairing.NEOX: ROPE_NEOX, RopePairing.NORM: ROPE_NORM}


def rope_fields(parts: PlanParts, rope: RopeSpec | None) -> dict[str, float]:
    """What `ops.gpu.heads` says of a rope; None: nothing is turned."""
    if rope is None:
        return {"turns": 0, "rope_kind": ROPE_NONE, "n_rot": 0, "magnitude": 1.0}
    factors = rope_factors(parts.model, rope)
    return {
        "turns": parts.constants.place(turns_of(rope_frequencies(rope, factors))),
        "rope_kind": ROPE_KINDS[rope.pairing],
        "n_rot": rope.n_rot,
        "magnitude": rope.magnitude,
    }
