"""Attention with a sliding window, over chosen keys, or over keys laid out in rows as values are.

The plain kind has a kernel of its own in `ops.cpu.attention`, which says how the work is cut.  The
window is as many keys as each token sees, itself included; pages before it are not read.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.attention import (
    ATTENTION,
    BLOCK_PAGES,
    ITEM,
    ITEM_BYTES,
    MINUS_INFINITY,
    WORKSPACE,
    WORKSPACE_BYTES,
    begin,
    block_pages,
    block_softmax,
    end,
    end_block,
    page_at,
)
from ops.cpu.attention_page import row_scores
from ops.cpu.attention_rows import SCORE_ROW, page_scores, weigh_four, weigh_one, widened
from ops.cpu.job import clear, job_kernel, kernel_njit
from ops.cpu.kv_layout import F16_CACHE, F32_CACHE, PAGE_TOKENS, Q8_CACHE
from ops.cpu.memory import array, load_i32, store_f32, store_i32

FOREVER = 1 << 31
"""A window that no position leaves."""


@kernel_njit
def row_page_scores(cache, q, n_rows, keys, dim, out):
    """`page_scores` of keys that lie in the page as values do, dim numbers each."""
    row = 0
    while row < n_rows:
        queries, target = q + 8 * row, out + SCORE_ROW * row
        four = n_rows - row >= 4
        if cache == F16_CACHE:
            if four:
                row_scores(F16_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
            else:
                row_scores(F16_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        elif cache == F32_CACHE:
            if four:
                row_scores(F32_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
            else:
                row_scores(F32_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        elif four:
            row_scores(Q8_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
        else:
            row_scores(Q8_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        row += 4 if four else 1


@kernel_njit
def window_values(cache, weights, n_rows, values, row_dim, dim, first_end, window, group, out):
    """As `page_values`, but a row sees only the `window` tokens before its end; 0: all of them.

    row_dim: numbers of a value in the page, of which the first dim are added up.
    """
    window = window if window > 0 else FOREVER
    for row in range(0, n_rows, 4):
        rows = min(4, n_rows - row)
        # The row that starts last and the one that ends first bound what all four see.
        begin = max(0, first_end + (row + rows - 1) // group - window)
        end = min(PAGE_TOKENS, first_end + row // group)
        if rows < 4 or begin >= end:
            begin = end = PAGE_TOKENS
        for r in range(row, row + rows):
            r_begin = max(0, first_end + r // group - window)
            r_end = min(begin, first_end + r // group)
            if r_begin < r_end:
                weigh_one(cache, weights, r, values, row_dim, dim, r_begin, r_end, out)
        if begin == end:
            continue
        weigh_four(cache, weights, row, values, row_dim, dim, begin, end, out)
        for r in range(row, row + rows):
            r_end = min(PAGE_TOKENS, first_end + r // group)
            if end < r_end:
                weigh_one(cache, weights, r, values, row_dim, dim, end, r_end, out)


@kernel_njit
def page_mask(a, token, page):
    """One bit for each key of a page of its sequence that a token reads."""
    if load_i32(a.reads_all + 4 * token):
        return np.int32(-1)
    return load_i32(a.masks + token * a.mask_stride + 4 * page)


@kernel_njit
def is_page_read(a, item, block, page):
    """Whether any of an item's tokens reads a key of a page of a block."""
    if a.masks == 0:
        return True
    for t in range(item.token, item.token + item.n_tokens):
        if page_mask(a, t, block * BLOCK_PAGES + page) != 0:
            return True
    return False


@kernel_njit
def mask_row(a, token, block, end_page, scores):
    """Scores of keys that a token does not read become minus infinity; whether it reads any."""
    if load_i32(a.reads_all + 4 * token):
        return True
    any_read = np.int32(0)
    for p in range(end_page):
        mask = page_mask(a, token, block * BLOCK_PAGES + p)
        any_read |= mask
        for t in range(PAGE_TOKENS):
            if (mask >> np.int32(t)) & np.int32(1) == 0:
                store_f32(scores + 4 * (PAGE_TOKENS * p + t), MINUS_INFINITY)
    return any_read != 0


@kernel_njit
def mask_scores(a, item, w, n_rows, block, end_page):
    """`mask_row` of all rows; block_reads: which rows read anything, scores of others are 0."""
    group = a.n_head // a.n_head_kv
    for row in range(n_rows):
        token, scores = np.int64(item.token + row // group), w.scores + SCORE_ROW * row
        reads = mask_row(a, token, block, end_page, scores)
        if not reads:
            clear(scores, SCORE_ROW)
        store_i32(w.block_reads + 4 * row, np.int32(reads))


@kernel_njit
def forget_unread(w, n_rows):
    """Rows that read nothing have no results of the block."""
    for row in range(n_rows):
        if load_i32(w.block_reads + 4 * row) == 0:
            store_f32(w.block_totals + 4 * row, np.float32(-1))


@kernel_njit
def attend_block(a, item, w, kv_head, n_rows, block):
    """Results of one block into block_peaks, block_totals, block_values."""
    table, first, first_page, end_page = block_pages(a, item, block)
    for p in range(first_page, end_page):
        if not is_page_read(a, item, block, p):
            continue
        keys = page_at(a.k_pages, a.k_page_bytes, table, p) + kv_head * a.k_head_bytes
        cache, keys = widened(a.k_cache, w.page, n_rows, keys, PAGE_TOKENS * a.dim_k)
        scores = w.scores + 4 * PAGE_TOKENS * p
        if a.keys_are_rows:
            row_page_scores(cache, w.queries, n_rows, keys, a.dim_k, scores)
        else:
            page_scores(cache, w.queries, n_rows, keys, a.dim_k, scores)
    if a.masks != 0:
        mask_scores(a, item, w, n_rows, block, end_page)
    block_softmax(a, w, n_rows, first)
    if a.masks != 0:
        forget_unread(w, n_rows)
    group = a.n_head // a.n_head_kv
    for p in range(first_page, end_page):
        if not is_page_read(a, item, block, p):
            continue
        values = page_at(a.v_pages, a.v_page_bytes, table, p) + kv_head * a.v_head_bytes
        cache, values = widened(a.v_cache, w.page, n_rows, values, PAGE_TOKENS * a.row_dim)
        weights, seen = w.scores + 4 * PAGE_TOKENS * p, first + 1 - p * PAGE_TOKENS
        window_values(
            cache, weights, n_rows, values, a.row_dim, a.dim_v_padded, seen, a.window, group,
            w.block_values,
        )  # fmt: skip


@job_kernel
def general_attention(args: int, chunk: int, worker: int) -> None:
    """One work item and kv head: see `ops.cpu.attention`."""
    a = array(args, 1, ATTENTION)[0]
    w = array(a.workspaces + worker * WORKSPACE_BYTES, 1, WORKSPACE)[0]
    item = array(a.items + ITEM_BYTES * (chunk // a.n_head_kv), 1, ITEM)[0]
    kv_head = chunk % a.n_head_kv
    n_rows = begin(a, item, w, kv_head)
    for block in range(item.first_block, item.end_block):
        attend_block(a, item, w, kv_head, n_rows, block)
        end_block(a, item, w, kv_head, n_rows, block)
    end(a, item, w, kv_head, n_rows)
