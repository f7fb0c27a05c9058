"""Choosing blocks of keys: the nth largest number, the bits that are set, attention under them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numba import cfunc, types

from ops.cpu.general_attention import mask_row
from ops.cpu.indexer import INDEXER, index_queries, select_blocks
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS
from ops.cpu.memory import array, store_f32, store_i64
from ops.cpu.program import address_of
from ops.cpu.selection import nth_largest
from tests.support.jobs import job_args, run_job

N_BEST, BLOCK = 3, 4
BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS


@pytest.fixture(scope="module")
def nth() -> ctypes._CFuncPtr:
    @cfunc(types.void(types.int64, types.int64, types.int64, types.int64))
    def call(address, n, rank, out):
        limit, n_equal = nth_largest(address, n, rank)
        store_f32(out, limit)
        store_i64(out + 8, n_equal)

    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(call.address)
    function.kept = call
    return function


@pytest.mark.parametrize("n", [1, 2, 3, 17, 200])
@pytest.mark.parametrize("n_values", [2, 1000])
def test_nth_largest_and_its_equals(nth: ctypes._CFuncPtr, n: int, n_values: int) -> None:
    rng = np.random.default_rng(n)
    for rank in {1, (n + 1) // 2, n}:
        numbers = rng.integers(0, n_values, n).astype(np.float32)
        out = np.zeros(2, np.int64)
        sorted_numbers = np.sort(numbers)[::-1]
        nth(address_of(numbers), n, rank, address_of(out))
        assert out[:1].view(np.float32)[0] == sorted_numbers[rank - 1]
        assert out[1] == (sorted_numbers[:rank] == sorted_numbers[rank - 1]).sum()
        assert np.array_equal(np.sort(numbers)[::-1], sorted_numbers)


def bits(mask: np.ndarray, n: int) -> list[int]:
    """The tokens whose bit is set."""
    words = mask.view(np.uint32)
    return [t for t in range(n) if words[t // 32] >> np.uint32(t % 32) & np.uint32(1)]


def test_the_best_blocks_and_the_tokens_after_the_last_are_read() -> None:
    """50 tokens are 12 blocks and 2 tokens; of equal scores the earlier block is taken."""
    position, n_blocks = 49, 12
    scores = np.zeros((1, 32), np.float32)
    scores[0, [7, 10]] = 5, 4
    scores[0, [2, 5, 8]] = 3
    masks, scratch = np.full((1, 4), -1, np.int32), np.zeros(32, np.float32)
    positions, reads_all = np.array([position], np.int32), np.zeros(1, np.int32)
    args = job_args(
        INDEXER, positions=positions, block=BLOCK, n_best=N_BEST, scores=scores, max_blocks=32,
        scratch=scratch, masks=masks, mask_stride=masks.strides[0], reads_all=reads_all,
    )  # fmt: skip
    run_job(select_blocks, args, 1)
    chosen = (2, 7, 10)
    expected = [t for block in chosen for t in range(block * BLOCK, (block + 1) * BLOCK)]
    assert bits(masks[0], 64) == [*expected, *range(n_blocks * BLOCK, position + 1)]


@pytest.mark.parametrize(("position", "reads_all"), [(0, 1), (11, 1), (14, 1), (15, 0), (40, 0)])
def test_few_blocks_are_all_read(position: int, reads_all: int) -> None:
    """Exactly dense up to n_best complete blocks and an incomplete one."""
    positions, flags = np.array([position], np.int32), np.full(1, 7, np.int32)
    query = np.ones((1, 16), np.float32)
    args = job_args(
        INDEXER, positions=positions, block=BLOCK, n_best=N_BEST, reads_all=flags, query=query,
        query_stride=query.strides[0], n_head=1, dim=16,
    )  # fmt: skip
    run_job(index_queries, args, 1)
    assert flags[0] == reads_all


def test_unread_keys_get_no_weight_and_an_unread_block_says_so() -> None:
    fields = np.dtype(
        [("positions", "i8"), ("masks", "i8"), ("mask_stride", "i8"), ("reads_all", "i8")],
        metadata={"name": "mask"},
    )

    @cfunc(types.int64(types.int64, types.int64, types.int64))
    def call(record, block, scores):
        a = array(record, 1, fields)[0]
        return np.int64(mask_row(a, np.int64(0), block, BLOCK_PAGES, scores))

    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(call.address)
    masks, positions = np.zeros((1, 32), np.int32), np.array([1000], np.int32)
    masks[0, 1] = 0b101
    reads_all = np.zeros(1, np.int32)
    args = np.zeros(1, fields)
    args["positions"], args["masks"] = address_of(positions), address_of(masks)
    args["mask_stride"], args["reads_all"] = masks.strides[0], address_of(reads_all)
    scores = np.ones((2, BLOCK_TOKENS), np.float32)
    assert function(address_of(args), 0, address_of(scores[0])) == 1
    assert np.flatnonzero(np.isfinite(scores[0])).tolist() == [32, 34]
    assert function(address_of(args), 1, address_of(scores[1])) == 0
    assert not np.isfinite(scores[1]).any()
