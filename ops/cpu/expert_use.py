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
    n_layers="i8",
    n_tokens="i8",
    n_used="i8",
    n_expert="i8",
    n_kinds="i8",
)
"""choices  i32[n_layers][n_tokens][n_used], -1: none
kinds    i8[n_layers][n_expert], below n_kinds - 1, which means none
counts   i64[n_tokens][n_layers][n_kinds]: becomes how many choices are of each kind
"""

ADD_TOKEN = args_record(
    "add token",
    choices="i8",
    first="i8",
    second="i8",
    uses="i8",
    cells="i8",
    n_cells="i8",
    n_layers="i8",
    n_used="i8",
    n_expert="i8",
    first_worth="f8",
    second_worth="f8",
)
"""A cell is the number of an expert over all layers.

choices  i32[n_layers][n_used] of one token, -1: none
first, second  f64 of each cell, to which the worths are added; uses  i64 of each cell
cells    i64[n_layers * n_used]: become those of the choices, in order; n_cells: how many
"""

FIND_SWAPS = args_record(
    "find swaps",
    cells="i8",
    slots="i8",
    coming="i8",
    classes="i8",
    first="i8",
    second="i8",
    free="i8",
    best="i8",
    scores="i8",
    lowest="i8",
    low_scores="i8",
    swaps="i8",
    n_all="i8",
    n_classes="i8",
    n_swaps="i8",
    n_cells="i8",
    most="i8",
    most_best="i8",
    most_lowest="i8",
    search="i8",
    first_factor="f8",
    second_factor="f8",
    margin="f8",
)
"""cells    i64[n_cells], each once: those that may get a slot, if they are in none
slots    i32 of each cell, -1: none;  coming  u8: a slot waits for it;  classes  i32: its slots'
first, second  f64: its score is the sum of both, each with its factor; of n_all cells
free     i64[n_classes]: free slots of each class, fewer afterwards
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


@job_kernel
def add_token(args: int, chunk: int, worker: int) -> None:
    """Add a token's choices: see `ADD_TOKEN`."""
    records = array(args, 1, ADD_TOKEN)
    a = records[0]
    n, n_total = a.n_layers * a.n_used, a.n_layers * a.n_expert
    choices = array(a.choices, n, np.int32)
    first, second = array(a.first, n_total, np.float64), array(a.second, n_total, np.float64)
    uses, cells = array(a.uses, n_total, np.int64), array(a.cells, n, np.int64)
    n_cells = 0
    for i in range(n):
        expert = choices[i]
        if 0 <= expert < a.n_expert:
            cell = i // a.n_used * a.n_expert + expert
            first[cell] += a.first_worth
            second[cell] += a.second_worth
            uses[cell] += 1
            cells[n_cells] = cell
            n_cells += 1
    records[0].n_cells = n_cells


@kernel_njit
def score_of(a, cell):
    """A cell's score: see `FIND_SWAPS`."""
    score = array(a.first + 8 * cell, 1, np.float64)[0] * a.first_factor
    return score + array(a.second + 8 * cell, 1, np.float64)[0] * a.second_factor


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
    first, second = array(a.first, a.n_all, np.float64), array(a.second, a.n_all, np.float64)
    lowest = array(a.lowest, a.n_classes * a.most_lowest, np.int64)
    scores = array(a.low_scores, a.n_classes * a.most_lowest, np.float64)
    n, first_factor, second_factor = a.most_lowest, a.first_factor, a.second_factor
    for i in range(a.n_classes * n):
        lowest[i], scores[i] = -1, np.inf
    for cell in range(a.n_all):
        score = first[cell] * first_factor + second[cell] * second_factor
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
    """Who comes and who leaves: see `FIND_SWAPS`."""
    records = array(args, 1, FIND_SWAPS)
    a = records[0]
    best, scores = array(a.best, a.most_best, np.int64), array(a.scores, a.most_best, np.float64)
    classes, swaps = array(a.classes, a.n_all, np.int32), array(a.swaps, 2 * a.most, np.int64)
    free, search = array(a.free, a.n_classes, np.int64), a.search
    n_best, n_swaps = find_best(a), 0
    for i in range(n_best):
        kind, victim = classes[best[i]], -1
        if free[kind] > 0:
            free[kind] -= 1
        elif free[kind] == 0:
            if search != 0:
                find_lowest(a)
                search = 0
            victim = take_lower(a, kind, scores[i] - a.margin)
            if victim < 0:
                free[kind] = -1  # nor is there one for those of the class that want a slot less
        if free[kind] >= 0:
            swaps[2 * n_swaps], swaps[2 * n_swaps + 1] = best[i], victim
            n_swaps += 1
            if n_swaps == a.most:
                break
    records[0].search, records[0].n_swaps = search, n_swaps


def call_of(kernel: JobKernel, args: NDArray[Any]) -> Callable[[], object]:
    """What runs the kernel's only chunk with these args, which must outlive it.

    It keeps the GIL: to get it back could take milliseconds.
    """
    function = ctypes.PYFUNCTYPE(None, *3 * (ctypes.c_int64,))(kernel.address)
    return partial(function, address_of(args), 0, 0)
