"""What a cache of experts does for every token: counting, and looking for what it lacks.

Each is one call from Python, where NumPy takes a dozen: beside workers that read gigabytes a second
little of NumPy is left in a core's caches, and each of its calls takes 4 us instead of one. The
thread that decides makes these calls, not the team. What is no expert's number counts as none:
nobody has looked at what a step that failed leaves behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.job import JobKernel, args_record, job_kernel, kernel_njit
from ops.cpu.memory import array
from ops.cpu.program import address_of

COUNT_USES = args_record(
    "count uses",
    choices="i8",
    kinds="i8",
    counts="i8",
    totals="i8",
    n_layers="i8",
    n_tokens="i8",
    n_used="i8",
    n_expert="i8",
    n_kinds="i8",
)
"""choices  i32[n_layers][n_tokens][n_used], -1: none
kinds    i8[n_layers][n_expert], below n_kinds - 1, which means none
counts   i64[n_tokens][n_layers][n_kinds]: becomes how many choices are of each kind
totals   i64[n_layers][n_kinds], to which those of all tokens are added
"""

TOKEN_USES = args_record(
    "token uses",
    choices="i8",
    sums="i8",
    cells="i8",
    slots="i8",
    coming="i8",
    classes="i8",
    free="i8",
    left="i8",
    best="i8",
    scores="i8",
    lowest="i8",
    low_scores="i8",
    swaps="i8",
    n_layers="i8",
    n_used="i8",
    n_expert="i8",
    n_all="i8",
    n_classes="i8",
    most_lowest="i8",
    n_cells="i8",
    n_swaps="i8",
    most="i8",
    most_best="i8",
    search="i8",
    first_worth="f8",
    second_worth="f8",
    first_growth="f8",
    second_growth="f8",
    first_weight="f8",
    second_weight="f8",
    margin="f8",
)
"""A cell is the number of an expert over all layers, of n_all.

choices  i32[n_layers][n_used] of one token, -1: none
sums     f64[n_cells][2], i64[n_cells][2], side by side: two sums of a cell's uses, each with what
         it was worth then; how many uses; whether it is among `cells`.  Worths grow by the growths
         with every token.  A cell's score: both sums, each with its weight by its worth now
cells    i64[n_cells]: those used since swaps were looked for, each once
slots    i32 of each cell, -1: none;  coming  u8: a slot waits for it;  classes  i32: its slots'
free     i64[n_classes]: free slots of each class;  left  the same, for what the search leaves
best, scores  i64, f64[most_best]: become the cells that want a slot, the highest scores first, of
         equals the last
lowest, low_scores  i64, f64[n_classes][most_lowest]: the cells in slots of each class that have
         the lowest scores, the lowest first; -1: taken, or there are no more
search   1: they are looked for anew if any is wanted, and then 0; 0: those found earlier will do
swaps    i64[most][2]: become the cells that get a slot, the best first, and those that leave for
         them, each by `margin` lower, the lowest first; -1: a slot is free.  n_swaps: how many
"""


@job_kernel
def count_uses(args: int, chunk: int, worker: int) -> None:
    """Count: see `COUNT_USES`."""
    a = array(args, 1, COUNT_USES)[0]
    n_layers, n_tokens, n_used, n_kinds = a.n_layers, a.n_tokens, a.n_used, a.n_kinds
    choices = array(a.choices, n_layers * n_tokens * n_used, np.int32)
    kinds = array(a.kinds, n_layers * a.n_expert, np.int8)
    counts = array(a.counts, n_tokens * n_layers * n_kinds, np.int64)
    totals = array(a.totals, n_layers * n_kinds, np.int64)
    for i in range(n_tokens * n_layers * n_kinds):
        counts[i] = 0
    at = 0
    for layer in range(n_layers):
        for token in range(n_tokens):
            row = (token * n_layers + layer) * n_kinds
            for _ in range(n_used):
                expert = choices[at]
                at += 1
                kind = np.int64(n_kinds - 1)
                if 0 <= expert < a.n_expert:
                    kind = np.int64(kinds[layer * a.n_expert + expert])
                counts[row + kind] += 1
                totals[layer * n_kinds + kind] += 1


@job_kernel
def add_token(args: int, chunk: int, worker: int) -> None:
    """Add a token's choices: see `TOKEN_USES`."""
    records = array(args, 1, TOKEN_USES)
    a = records[0]
    n, n_expert = a.n_layers * a.n_used, a.n_expert
    choices, cells = array(a.choices, n, np.int32), array(a.cells, a.n_all, np.int64)
    sums, numbers = array(a.sums, 4 * a.n_all, np.float64), array(a.sums, 4 * a.n_all, np.int64)
    first_worth = a.first_worth * a.first_growth
    second_worth = a.second_worth * a.second_growth
    n_cells = a.n_cells
    for i in range(n):
        expert = choices[i]
        if 0 <= expert < n_expert:
            cell = i // a.n_used * n_expert + expert
            sums[4 * cell] += first_worth
            sums[4 * cell + 1] += second_worth
            numbers[4 * cell + 2] += 1
            if numbers[4 * cell + 3] == 0:
                numbers[4 * cell + 3] = 1
                cells[n_cells] = cell
                n_cells += 1
    records[0].first_worth, records[0].second_worth = first_worth, second_worth
    records[0].n_cells = n_cells


@kernel_njit
def score_of(a, cell):
    """A cell's score: see `TOKEN_USES`."""
    sums = array(a.sums + 32 * cell, 2, np.float64)
    score = sums[0] * (a.first_weight / a.first_worth)
    return score + sums[1] * (a.second_weight / a.second_worth)


@kernel_njit
def find_best(a):
    """Fill `best` and `scores`; how many."""
    cells, best = array(a.cells, a.n_cells, np.int64), array(a.best, a.most_best, np.int64)
    scores = array(a.scores, a.most_best, np.float64)
    slots, coming = array(a.slots, a.n_all, np.int32), array(a.coming, a.n_all, np.uint8)
    n = 0
    for i in range(a.n_cells):
        cell = cells[i]
        if slots[cell] >= 0 or coming[cell] != 0:
            continue
        score = score_of(a, cell)
        if n == a.most_best:
            if score < scores[n - 1]:
                continue
            n -= 1
        at = n
        while at > 0 and score >= scores[at - 1]:
            best[at], scores[at] = best[at - 1], scores[at - 1]
            at -= 1
        best[at], scores[at] = cell, score
        n += 1
    return n


@kernel_njit
def find_lowest(a):
    """Fill `lowest` and `low_scores`."""
    slots, classes = array(a.slots, a.n_all, np.int32), array(a.classes, a.n_all, np.int32)
    sums = array(a.sums, 4 * a.n_all, np.float64)
    lowest = array(a.lowest, a.n_classes * a.most_lowest, np.int64)
    scores = array(a.low_scores, a.n_classes * a.most_lowest, np.float64)
    first_factor, second_factor = a.first_weight / a.first_worth, a.second_weight / a.second_worth
    n = a.most_lowest
    for i in range(a.n_classes * n):
        lowest[i], scores[i] = -1, np.inf
    for cell in range(a.n_all):
        score = sums[4 * cell] * first_factor + sums[4 * cell + 1] * second_factor
        end = classes[cell] * n + n - 1
        if (slots[cell] < 0) | (score >= scores[end]):  # one branch, nearly always taken
            continue
        row, at = end - n + 1, end
        while at > row and score < scores[at - 1]:
            lowest[at], scores[at] = lowest[at - 1], scores[at - 1]
            at -= 1
        lowest[at], scores[at] = cell, score


@kernel_njit
def take_lower(a, kind, below):
    """The first of the lowest of a class that is still in a slot and scores less, no longer among
    them; -1: there is none."""
    slots = array(a.slots, a.n_all, np.int32)
    lowest = array(a.lowest + 8 * kind * a.most_lowest, a.most_lowest, np.int64)
    for i in range(a.most_lowest):
        cell = lowest[i]
        if cell >= 0 and slots[cell] >= 0 and score_of(a, cell) < below:
            lowest[i] = -1
            return cell
    return -1


@job_kernel
def find_swaps(args: int, chunk: int, worker: int) -> None:
    """Who comes and who leaves: see `TOKEN_USES`."""
    records = array(args, 1, TOKEN_USES)
    a = records[0]
    best, scores = array(a.best, a.most_best, np.int64), array(a.scores, a.most_best, np.float64)
    classes, swaps = array(a.classes, a.n_all, np.int32), array(a.swaps, 2 * a.most, np.int64)
    free, left = array(a.free, a.n_classes, np.int64), array(a.left, a.n_classes, np.int64)
    for kind in range(a.n_classes):
        left[kind] = free[kind]
    n_best, n_swaps, search = 0 if a.most <= 0 else find_best(a), 0, a.search
    for i in range(n_best):
        kind, victim = classes[best[i]], -1
        if left[kind] > 0:
            left[kind] -= 1
        elif left[kind] == 0:
            if search != 0:
                find_lowest(a)
                search = 0
            victim = take_lower(a, kind, scores[i] - a.margin)
            if victim < 0:
                left[kind] = -1  # nor is there one for those of the class that want a slot less
        if left[kind] >= 0:
            swaps[2 * n_swaps], swaps[2 * n_swaps + 1] = best[i], victim
            n_swaps += 1
            if n_swaps == a.most:
                break
    cells, numbers = array(a.cells, a.n_cells, np.int64), array(a.sums, 4 * a.n_all, np.int64)
    for i in range(a.n_cells):
        numbers[4 * cells[i] + 3] = 0
    records[0].search, records[0].n_swaps, records[0].n_cells = search, n_swaps, 0


def call_of(kernel: JobKernel, args: NDArray[Any]) -> Callable[[], object]:
    """What runs the kernel's only chunk with these args, which must outlive it.

    It keeps the GIL: to get it back could take milliseconds.
    """
    function = ctypes.PYFUNCTYPE(None, *3 * (ctypes.c_int64,))(kernel.address)
    return partial(function, address_of(args), 0, 0)
