"""How the graphs of several GPUs begin and end: with the residual stream taken and handed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.gpu import handover
from ops.gpu.handover import hand_over, take_over, take_tokens
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.gpu.results import CHOSEN_BYTES


@dataclass(frozen=True)
class GraphEnds:
    """What comes before and behind the layers.

    taking      arguments of `take_over` but the step's; None: the tokens' embeddings come first
    giving      arguments of `hand_over` but the step's; None: logits come last
    tokens      arguments of `take_tokens` but the step's; None: tokens are chosen here, or the step
                begins elsewhere
    has_states  control blocks say where states are: some layer, perhaps on another GPU, has any
    memories    bytes of a token in control blocks: those that memories of all layers take, and how
                many of them come before these layers'
    """

    taking: Mapping[str, int] | None = None
    giving: Mapping[str, int] | None = None
    tokens: Mapping[str, int] | None = None
    has_states: bool = False
    memories: tuple[int, int] = (0, 0)


ALONE = GraphEnds()
"""A whole model without states."""


def add_take_tokens(parts: PlanParts, arguments: Mapping[str, int]) -> None:
    """The tokens that the last GPU chooses in the step before, if there are such."""
    memory = parts.memory
    parts.plan.add(
        "take_tokens",
        take_tokens(),
        (1,),
        {
            "epoch": memory.epoch,
            "count": parts.token_count,
            "token_ids": parts.control("token_ids"),
            "done": memory.results_done,
            "source": memory.host_chosen,
            "stride": CHOSEN_BYTES,
            "tokens": memory.chosen,
            **arguments,
        },
    )


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
