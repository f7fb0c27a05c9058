"""How the graphs of several GPUs begin and end: with the residual stream taken and handed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.gpu import handover
from ops.gpu.handover import hand_over, take_over
from runtime.engine.gpu.plan_parts import PlanParts


@dataclass(frozen=True)
class GraphEnds:
    """What comes before and behind the layers.

    taking      arguments of `take_over` but the step's; None: the tokens' embeddings come first
    giving      arguments of `hand_over` but the step's; None: logits come last
    has_states  control blocks say where states are: some layer, perhaps on another GPU, has any
    memories    f32 values of a token in control blocks: those that memories of all layers take, and
                how many of them come before these layers'
    """

    taking: Mapping[str, int] | None = None
    giving: Mapping[str, int] | None = None
    has_states: bool = False
    memories: tuple[int, int] = (0, 0)


ALONE = GraphEnds()
"""A whole model without states."""


def add_take_over(parts: PlanParts, arguments: Mapping[str, int]) -> int:
    """Address of the residual stream of the GPU before, f32[n_tokens, width]."""
    row_bytes = _row_bytes(parts)
    x = parts.room.place("x", parts.n_tokens * row_bytes)
    parts.plan.add(
        "take_over",
        take_over(),
        (handover.blocks(parts.n_tokens, row_bytes),),
        {
            "epoch": parts.memory.epoch,
            "count": parts.token_count,
            "x": x,
            "row_bytes": row_bytes,
            **arguments,
        },
    )
    return x


def add_hand_over(parts: PlanParts, x: int, arguments: Mapping[str, int]) -> None:
    """The residual stream for the next GPU."""
    row_bytes = _row_bytes(parts)
    parts.plan.add(
        "hand_over",
        hand_over(overlapped=parts.overlapped),
        (handover.blocks(parts.n_tokens, row_bytes),),
        {
            "epoch": parts.memory.epoch,
            "count": parts.token_count,
            "x": x,
            "row_bytes": row_bytes,
            **arguments,
        },
        overlapped=parts.overlapped,
    )


def _row_bytes(parts: PlanParts) -> int:
    spec = parts.model.spec
    return 4 * spec.n_embd * spec.n_stream
