"""A worker's own chunks: each chunk is taken once, its own first, others' when they are gone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ops.cpu.own_chunks import own_chunks, own_share, take_chunk
from ops.cpu.program import LINE, aligned

N_WORKERS = 5


def taken(order: list[int], number: int, sizes: tuple[int, int, int], queues: int) -> list[int]:
    """Chunks that the workers of `order` get in turn; sizes: experts, their rows, a chunk's."""
    return [take_chunk(queues, number, worker, N_WORKERS, *sizes) for worker in order]


@pytest.mark.parametrize("sizes", [(1, 768, 78), (3, 768, 154), (2, 6, 2), (8, 4, 256)])
def test_every_chunk_is_taken_once(sizes: tuple[int, int, int]) -> None:
    n_experts, n_rows, rows = sizes
    n_chunks = n_experts * -(-n_rows // rows)
    memory = aligned((N_WORKERS, LINE), np.uint8)
    rng = np.random.default_rng(n_rows)
    for number in (1, 2, 70_000):
        order = rng.integers(0, N_WORKERS, n_chunks).tolist()
        assert sorted(taken(order, number, sizes, memory.ctypes.data)) == list(range(n_chunks))
        assert take_chunk(memory.ctypes.data, number, 0, N_WORKERS, *sizes) == -1


def test_a_worker_begins_with_the_rows_of_its_share() -> None:
    n_rows, rows = 760, 76
    memory = aligned((N_WORKERS, LINE), np.uint8)
    for worker in (3, 0, 4, 1, 2):
        first, end = own_share(worker, N_WORKERS, n_rows)
        for expert in range(2):
            for first_row in (first, first + rows):
                chunk = take_chunk(memory.ctypes.data, 9, worker, N_WORKERS, 2, n_rows, rows)
                assert chunk == expert * 10 + first_row // rows
                assert first <= first_row < end


def test_shares_cover_all_chunks() -> None:
    for n_rows, rows in ((768, 26), (2048, 48), (100, 256), (7, 2)):
        edges = [own_chunks(worker, N_WORKERS, n_rows, rows) for worker in range(N_WORKERS)]
        assert edges[0][0] == 0
        assert edges[-1][1] == -(-n_rows // rows)
        assert all(a[1] == b[0] for a, b in pairwise(edges))
