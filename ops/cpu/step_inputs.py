"""Write a step's inputs where the jobs read them: one compiled call before each step.

The call checks the step and cuts its attention into work items: tiles of prompt tokens, or for
decoding one token and, where any context is longer than a block, one block of its keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from ops.cpu.attention import ITEM, ITEM_BYTES
from ops.cpu.job import args_record, clear, kernel_njit
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS
from ops.cpu.memory import array, load_i32, store_i32, store_i64
from ops.cpu.rows import scale_row

STEP_INPUTS = args_record(
    "step inputs",
    max_tokens="i8",
    max_sequences="i8",
    n_vocab="i8",
    n_positions="i8",
    tile_tokens="i8",
    n_tokens="i8",
    n_outputs="i8",
    positions="i8",
    sequences="i8",
    cell_pages="i8",
    page_tables="i8",
    table_stride="i8",
    items="i8",
    partial_spans="i8",
    output_tokens="i8",
    is_output="i8",
    not_finite="i8",
    counts="i8",
    embedding="i8",
    embedding_stride="i8",
    x="i8",
    x_stride="i8",
)
"""The limits of a step, then addresses.

n_tokens, n_outputs     i64
is_output               i32[max_tokens], room
not_finite              i32[1 + max_tokens], of any output and of each; zeroed
counts                  i64[3]: attention items, those of them that outputs depend on, and 1 where
                        the results of items are merged later
embedding               f32 rows of all tokens, copied to the rows at x; 0: somebody else does it
"""

I32 = NDArray[np.int32]
FITS, TOO_MANY, OUT_OF_RANGE = 0, 1, 2
VECTOR = types.Array(types.int32, 1, "A", readonly=True)
TABLE = types.Array(types.int32, 2, "A", readonly=True)
SIGNATURE = types.int64(
    types.int64, types.boolean, VECTOR, VECTOR, VECTOR, TABLE, VECTOR
)  # inputs, decode, token_ids, positions, rows, page_tables, output_tokens


@kernel_njit
def store_item(a, index, token, n_tokens, first_block, end_block, partial):
    """Write one work item."""
    item = array(a.items + ITEM_BYTES * index, 1, ITEM)[0]
    item.token = token
    item.n_tokens = n_tokens
    item.first_block = first_block
    item.end_block = end_block
    item.partial = partial


@kernel_njit
def split_by_block(a, n, positions):
    """(items, whether they are merged): one a token and block if a context exceeds a block."""
    longest = 0
    for i in range(n):
        longest = max(longest, positions[i])
    if longest < BLOCK_TOKENS:
        for i in range(n):
            store_item(a, i, i, 1, 0, 1, -1)
        return n, 0
    n_items = 0
    for i in range(n):
        n_blocks = positions[i] // BLOCK_TOKENS + 1
        store_i32(a.partial_spans + 8 * i, np.int32(n_items))
        store_i32(a.partial_spans + 8 * i + 4, np.int32(n_blocks))
        for block in range(n_blocks):
            store_item(a, n_items, i, 1, block, block + 1, n_items)
            n_items += 1
    return n_items, 1


@kernel_njit
def tile_end(a, n, rows, first):
    """The end of the tile that starts at token `first`, and whether it has an output."""
    end, has_output = first, 0
    while end < n and end - first < a.tile_tokens and rows[end] == rows[first]:
        has_output |= load_i32(a.is_output + 4 * end)
        end += 1
    return end, has_output


@kernel_njit
def split_by_tile(a, n, positions, rows):
    """(items, those with outputs): tiles of prompt tokens, outputs and long contexts first."""
    longest = 0
    for i in range(n):
        longest = max(longest, positions[i] // BLOCK_TOKENS + 1)
    n_items = n_output_items = 0
    for wanted in (1, 0):
        for n_blocks in range(longest, 0, -1):
            first = 0
            while first < n:
                end, has_output = tile_end(a, n, rows, first)
                if has_output == wanted and positions[end - 1] // BLOCK_TOKENS + 1 == n_blocks:
                    store_item(a, n_items, first, end - first, 0, n_blocks, -1)
                    n_items += 1
                first = end
        if wanted:
            n_output_items = n_items
    return n_items, n_output_items


@functools.cache
def fill_function() -> Callable[..., int]:
    """The compiled `fill`, compiled or loaded from the cache when first asked for."""
    compiled: Callable[..., int] = njit(SIGNATURE, cache=True, error_model="numpy")(fill)
    return compiled


def fill(
    inputs: int,
    decode: bool,
    token_ids: I32,
    positions: I32,
    rows: I32,
    page_tables: I32,
    output_tokens: I32,
) -> int:
    """Write a step, see `runtime.engine.step.Step`; FITS, or why nothing was written."""
    a = array(inputs, 1, STEP_INPUTS)[0]
    n, n_outputs, n_sequences = len(token_ids), len(output_tokens), len(page_tables)
    if not 0 < n <= a.max_tokens or n_sequences > a.max_sequences:
        return TOO_MANY
    for i in range(n):
        if not (0 <= token_ids[i] < a.n_vocab and 0 <= positions[i] < a.n_positions):
            return OUT_OF_RANGE
    store_i64(a.n_tokens, n)
    store_i64(a.n_outputs, n_outputs)
    n_table = page_tables.shape[1]
    for s in range(n_sequences):
        for page in range(n_table):
            store_i32(a.page_tables + s * a.table_stride + 4 * page, page_tables[s, page])
    for i in range(n):
        store_i32(a.positions + 4 * i, positions[i])
        store_i32(a.sequences + 4 * i, rows[i])
        page = positions[i] // PAGE_TOKENS
        known = page < n_table
        store_i32(a.cell_pages + 4 * i, page_tables[rows[i], page] if known else np.int32(-1))
        if a.embedding != 0:
            row = a.embedding + np.int64(token_ids[i]) * a.embedding_stride
            scale_row(a.x + i * a.x_stride, row, a.embedding_stride // 4, np.float32(1))
    clear(a.not_finite, 4 * (n_outputs + 1))
    clear(a.is_output, 4 * n)
    for i in range(n_outputs):
        store_i32(a.output_tokens + 4 * i, output_tokens[i])
        store_i32(a.is_output + 4 * np.int64(output_tokens[i]), np.int32(1))
    counts = array(a.counts, 3, np.int64)
    if decode:
        counts[0], counts[2] = split_by_block(a, n, positions)
        counts[1] = counts[0]
    else:
        counts[0], counts[1] = split_by_tile(a, n, positions, rows)
        counts[2] = 0
    return FITS
