"""The GPU kernels `route` and `group`: which experts each token uses, and each expert's tokens.

What `ops.cpu.router` does, with its bits.

`route`: a block a token, grid (tokens,).

logits          f32[*, logits_stride]: the router's product, n_expert values a token
logits_stride   values from a token's logits to the next one's
count           address of the u32 number of tokens, a block beyond it leaves; 0: all of the grid
bias            f32[n_expert], added for the choice alone; 0: none
n_expert        up to 1024
n_used          up to 32
score           one of `SCORES`
n_groups        experts form this many groups of equal size (up to 32), of which the n_groups_used
n_groups_used   with the largest sums of their two best selection scores are kept; 1: no grouping
renormalise     0 or 1: divide the weights by their sum, at least 2^-14
scale           multiplies the weights at the end
table           u64[n_expert, 4]: the layer's row of the model's table; 0: experts is not written
in_place        0 or 1: some experts without a first address are read where the host has them, see
                `in_place_word`
shared_logits   f32[*, shared_stride]: the shared expert's gate, the first value of each row; 0:
shared_stride   there is none
choices         i32[tokens, n_used], written: best first, equals by the lower expert
weights         f32[tokens, n_used], written
experts         u64[tokens * n_used, 4], written: the chosen experts' rows of the table; zeros for
                tokens of the grid that the step does not have
shared_weights  f32[tokens], written: the sigmoid of the shared expert's gate
late            not 0: what precedes the launch does not make the logits, and runs beside it: it is
                waited for only before results are stored

`group`: a counting sort of the choices by expert, one block, grid (1,).

choices         i32[tokens, n_used], every one below n_expert
count           address of the u32 number of tokens
n_used, n_expert (up to 1024)
offsets         i32[n_expert + 1], written: the first slot of each expert, used or not, then all
slots           i32[tokens, n_used], written: the slot of each choice
slot_tokens     i32[n_slots], written: the token of each slot; slots are sorted by expert, token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import exp
from ops.gpu.kernel import WARP, Kernel, launch_defines
from ops.quants.block import F32

I32 = NDArray[np.int32]

SOFTMAX, SIGMOID, SOFTMAX_SELECTED = 0, 1, 2
"""SCORES: over all experts; of each logit; the raw logits choose, softmax over the chosen."""

MAX_EXPERTS, MAX_USED, MAX_GROUPS = 1024, 32, 32
RENORMALISE_FLOOR = np.float32(2.0**-14)

ROW_BYTES = 32
"""Of a row of the table."""

ROUTE_BLOCKS = (128, 256, 512)
"""Threads of a choice: one an expert, where there are so many."""

GROUP_BLOCK = 512

CHOICE_PARAMS = (
    ("bias", "u64"),
    ("n_expert", "u32"),
    ("n_used", "u32"),
    ("score", "u32"),
    ("n_groups", "u32"),
    ("n_groups_used", "u32"),
    ("renormalise", "u32"),
    ("scale", "f32"),
    ("table", "u64"),
    ("in_place", "u32"),
)
"""What a choice goes by: `Routing`, the biases of the scores, where experts lie."""

ROUTE_PARAMS = (
    ("logits", "u64"),
    ("logits_stride", "u32"),
    ("count", "u64"),
    *CHOICE_PARAMS,
    ("shared_logits", "u64"),
    ("shared_stride", "u32"),
    ("choices", "u64"),
    ("weights", "u64"),
    ("experts", "u64"),
    ("shared_weights", "u64"),
    ("late", "u32"),
)

GROUP_PARAMS = (
    ("choices", "u64"),
    ("count", "u64"),
    ("n_used", "u32"),
    ("n_expert", "u32"),
    ("offsets", "u64"),
    ("slots", "u64"),
    ("slot_tokens", "u64"),
)


@dataclass(frozen=True)
class Routing:
    """How a router chooses; the fields are those of the kernel."""

    n_used: int
    score: int = SOFTMAX
    n_groups: int = 1
    n_groups_used: int = 1
    renormalise: bool = False
    scale: float = 1.0


def route(block: int = ROUTE_BLOCKS[0], *, overlapped: bool = False) -> Kernel:
    """The router's choice; grid (tokens,), block `route_block`."""
    return Kernel(
        entry="route",
        source="route.ptx",
        defines={
            "THREADS": block,
            "WARPS": block // WARP,
            **launch_defines(block, 1, overlapped),
        },
        params=ROUTE_PARAMS,
        block=block,
        reference=route_reference,
    )


def route_block(n_expert: int) -> int:
    """Threads for a choice among so many."""
    return next((block for block in ROUTE_BLOCKS if block >= n_expert), ROUTE_BLOCKS[-1])


def group(*, overlapped: bool = False) -> Kernel:
    """The choices by expert; grid (1,), shared memory `group_shared_bytes`."""
    return Kernel(
        entry="group",
        source="group.ptx",
        defines=launch_defines(GROUP_BLOCK, 1, overlapped),
        params=GROUP_PARAMS,
        block=GROUP_BLOCK,
        reference=group_reference,
    )


def in_place_word(row: int, every: int) -> int:
    """The fourth word of an expert's row in the table, if `route` may have it read in place.

    Of a token's experts that have such a word and no first address, in its order, each `every`th
    gets the addresses in the 32 bytes at `row`.

    Raises: ValueError.
    """
    if row % ROW_BYTES or not 1 < every < ROW_BYTES:
        raise ValueError(f"no experts are read in place from {row:#x}, one of {every}")
    return row | every


def in_place(missed: NDArray[np.bool_], every: int) -> NDArray[np.bool_]:
    """Which of bool[..., n_used] experts with such a word and no address are read in place."""
    chosen: NDArray[np.bool_] = missed & (np.cumsum(missed, -1) % every == 0)
    return chosen


def group_shared_bytes(n_expert: int) -> int:
    """Dynamic shared memory of `group`: a counter for each warp and expert."""
    return GROUP_BLOCK // WARP * 4 * n_expert


def route_reference(logits: F32, routing: Routing, bias: F32 | None = None) -> tuple[I32, F32]:
    """(choices i32[tokens, n_used], weights f32[tokens, n_used]) of f32[tokens, n_expert]."""
    with np.errstate(all="ignore"):
        rows = [_route_row(row, routing, bias) for row in logits]
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-x))


def group_reference(choices: I32, n_expert: int) -> tuple[I32, I32, I32]:
    """(offsets, slots, slot_tokens) of choices i32[tokens, n_used]."""
    flat = choices.reshape(-1)
    order = np.argsort(flat, kind="stable")
    slots = np.empty(len(flat), np.int32)
    slots[order] = np.arange(len(flat), dtype=np.int32)
    counts = np.bincount(flat, minlength=n_expert)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = (order // choices.shape[1]).astype(np.int32)
    return offsets, slots.reshape(choices.shape), tokens


def variants() -> Iterator[tuple[str, Kernel]]:
    """Both, alone and overlapped; choices by every number of threads."""
    for overlapped in (False, True):
        early = ", overlapped" if overlapped else ""
        for block in ROUTE_BLOCKS:
            yield f"route ({block} threads{early})", route(block, overlapped=overlapped)
        yield f"group{' (overlapped)' if overlapped else ''}", group(overlapped=overlapped)


def _route_row(logits: F32, routing: Routing, bias: F32 | None) -> tuple[I32, F32]:
    if routing.score == SIGMOID:
        scores = sigmoid(logits)
    else:
        scores = _softmax(logits) if routing.score == SOFTMAX else logits
    selection = scores.copy() if bias is None else scores + bias
    if routing.n_groups > 1:
        _drop_groups(selection, routing)
    choices = np.empty(routing.n_used, np.int32)
    for i in range(routing.n_used):
        choices[i] = _best(selection)
        selection[choices[i]] = np.nan
    weights = scores[choices]
    if routing.score == SOFTMAX_SELECTED:
        weights = _softmax(weights)
    elif routing.renormalise:
        total = _sum_in_order(weights)
        weights = weights / (RENORMALISE_FLOOR if total < RENORMALISE_FLOOR else total)
    return choices, weights * np.float32(routing.scale)


def _softmax(x: F32) -> F32:
    powers = exp(x - x.max())
    return powers / _sum_of_lanes(powers)


def _sum_of_lanes(x: F32) -> np.float32:
    """Values 32 apart one after the other, then the halving tree over 32 sums."""
    sums = np.zeros((-(-len(x) // WARP), WARP), np.float32)
    sums.reshape(-1)[: len(x)] = x
    total = np.add.accumulate(sums, dtype=np.float32)[-1]
    while len(total) > 1:
        half = len(total) // 2
        total = total[:half] + total[half:]
    return np.float32(total[0])


def _sum_in_order(x: F32) -> np.float32:
    """One add after the other."""
    return np.float32(np.add.accumulate(x, dtype=np.float32)[-1])


def _best(scores: F32) -> int:
    """Index of the largest value, the lowest on ties; 0 where all are NaN."""
    numbers = np.flatnonzero(~np.isnan(scores))
    return int(numbers[scores[numbers].argmax()]) if len(numbers) else 0


def _drop_groups(selection: F32, routing: Routing) -> None:
    """Minus infinity for the groups with the lowest sums of two; of equals the later one goes."""
    groups = selection.reshape(routing.n_groups, -1)
    ordered = np.sort(np.where(np.isnan(groups), -np.inf, groups), axis=1)
    sums = ordered[:, -1] + (ordered[:, -2] if groups.shape[1] > 1 else np.float32(0))
    kept = np.argsort(-sums, kind="stable")[: routing.n_groups_used]
    for index in set(range(routing.n_groups)) - set(kept.tolist()):
        groups[index] = -np.inf
