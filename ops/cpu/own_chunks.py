"""Which of a layer's chunks a worker takes: its own ones first, which its cache may hold already.

A worker owns the same share of the rows of every expert, so that it can fetch them before anybody
knows which experts are asked for (`ops.cpu.look_ahead`). Its chunks stand in a queue, expert by
expert; whoever has none left takes the next one of somebody else's. Nothing is reset between
layers: the word of a queue carries the number of the layer that it was last used for.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.job import kernel_njit
from ops.cpu.memory import atomic_load, compare_and_swap
from ops.cpu.program import LINE

TAKEN_BITS = 16
TAKEN = (1 << TAKEN_BITS) - 1
"""The rest of a queue's word is the layer's number."""


@kernel_njit
def own_share(worker, n_workers, n):
    """(first, end) of a worker's share of n things."""
    return worker * n // n_workers, (worker + 1) * n // n_workers


@kernel_njit
def own_chunks(worker, n_workers, n_rows, rows):
    """(first, end) of a worker's chunks of an expert that has `n_rows`, `rows` in a chunk: those
    whose first row is in its share."""
    step = rows * n_workers
    return (worker * n_rows + step - 1) // step, ((worker + 1) * n_rows + step - 1) // step


@kernel_njit
def next_in_queue(word, number, n_chunks):
    """The next chunk of the queue of layer `number`, which has n_chunks; -1 if none is left."""
    while True:
        seen = atomic_load(word)
        taken = seen & TAKEN if seen >> TAKEN_BITS == number else np.int64(0)
        if taken >= n_chunks:
            return np.int64(-1)
        if compare_and_swap(word, seen, number << TAKEN_BITS | (taken + 1)):
            return taken


@kernel_njit
def take_chunk(queues, number, worker, n_workers, n_experts, n_rows, rows):
    """A chunk of layer `number` that nobody has taken: expert * chunks of an expert + its number.

    queues   of the phase: a word for each worker, a line apart
    number   of the layer, below 2^47, never used before
    As many calls as there are chunks all get one; one more gets -1.
    """
    per_expert = (n_rows + rows - 1) // rows
    owner = worker
    for _ in range(n_workers):
        first, end = own_chunks(owner, n_workers, n_rows, rows)
        each = end - first
        if each > 0:
            taken = next_in_queue(queues + LINE * owner, number, n_experts * each)
            if taken >= 0:
                return taken // each * per_expert + first + taken % each
        owner = owner + 1 if owner + 1 < n_workers else 0
    return np.int64(-1)
