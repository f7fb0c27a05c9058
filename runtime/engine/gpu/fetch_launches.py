"""Experts that prompts fetch, as launches: beside the main branch, a few pieces ahead of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ops.gpu.fetch import GRID, fetch_experts
from runtime.engine.gpu.plan_parts import PlanParts


@dataclass(frozen=True)
class ExpertPiece:
    """Neighbouring experts of a layer, whose products are launches of their own.

    matrices  address of u64[n, 4]: where the experts are
    is_all    the layer has no others
    """

    first: int
    n: int
    matrices: int
    is_all: bool = True


def begin_fetches(parts: PlanParts, tables: Sequence[int]) -> None:
    """Have the first pieces on their way; tables: of each MoE layer, the model's."""
    if parts.fetches is not None:
        _fetch(parts, range(parts.fetches.ahead), tables)


def expert_pieces(
    parts: PlanParts, layer: int, n_expert: int, tables: Sequence[int]
) -> Iterator[ExpertPiece]:
    """The experts of a MoE layer, to be multiplied before the next piece is asked for.

    Where they are fetched, what is added behind a piece waits for it; another one is on its way to
    the buffer of the piece before.
    """
    fetches = parts.fetches
    if fetches is None:
        yield ExpertPiece(0, n_expert, tables[layer])
        return
    for piece in fetches.of_layer(layer):
        parts.plan.join(fetches.buffer(piece))
        _fetch(parts, [piece.number + fetches.ahead], tables)
        is_all = piece.n == n_expert
        yield ExpertPiece(piece.first, piece.n, fetches.table(piece), is_all)


def _fetch(parts: PlanParts, numbers: Sequence[int], tables: Sequence[int]) -> None:
    """Copy pieces, as far as there are any, behind what the main branch has so far."""
    fetches = parts.fetches
    wanted = [fetches.pieces[n] for n in numbers if n < len(fetches.pieces)] if fetches else []
    if fetches is None or not wanted:
        return
    with parts.plan.side_branch():
        for piece in wanted:
            arguments = fetches.arguments(piece, tables[piece.layer])
            parts.plan.add(f"{piece.layer}.fetch", fetch_experts(), (GRID,), arguments)
            parts.plan.mark(fetches.buffer(piece))
