"""A page of one kv head and all the query rows of a work item: what its pieces are made of.

Rows go four at a time through the loops of `ops.cpu.attention_page`; the bits of a row do not
depend on the rows beside it.
"""

from __future__ import annotations

from ops.cpu.attention_page import scores, weigh_values
from ops.cpu.job import kernel_njit
from ops.cpu.kv_layout import BLOCK_TOKENS, F16_CACHE, F32_CACHE, PAGE_TOKENS, Q8_CACHE
from ops.cpu.rows import widen_f16

WIDEN_ROWS = 8
SCORE_ROW = 4 * BLOCK_TOKENS
"""Bytes between the scores of two rows."""


@kernel_njit
def page_scores(cache, q, n_rows, keys, dim, out):
    """Scores of one page's 32 keys for n_rows queries (addresses at q), 4 rows at a time."""
    row = 0
    while row < n_rows:
        queries, target = q + 8 * row, out + SCORE_ROW * row
        four = n_rows - row >= 4
        if cache == F16_CACHE:
            if four:
                scores(F16_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
            else:
                scores(F16_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        elif cache == F32_CACHE:
            if four:
                scores(F32_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
            else:
                scores(F32_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        elif four:
            scores(Q8_CACHE, 4, queries, keys, dim, target, SCORE_ROW)
        else:
            scores(Q8_CACHE, 1, queries, keys, dim, target, SCORE_ROW)
        row += 4 if four else 1


@kernel_njit
def weigh_four(cache, weights, values, dim, first, end, out):
    """out += weights times values, four rows."""
    stride = 4 * dim
    if cache == F16_CACHE:
        weigh_values(F16_CACHE, 4, weights, SCORE_ROW, values, dim, first, end, out, stride)
    elif cache == F32_CACHE:
        weigh_values(F32_CACHE, 4, weights, SCORE_ROW, values, dim, first, end, out, stride)
    else:
        weigh_values(Q8_CACHE, 4, weights, SCORE_ROW, values, dim, first, end, out, stride)


@kernel_njit
def weigh_one(cache, weights, values, dim, first, end, out):
    """out += weights times values, one row."""
    stride = 4 * dim
    if cache == F16_CACHE:
        weigh_values(F16_CACHE, 1, weights, SCORE_ROW, values, dim, first, end, out, stride)
    elif cache == F32_CACHE:
        weigh_values(F32_CACHE, 1, weights, SCORE_ROW, values, dim, first, end, out, stride)
    else:
        weigh_values(Q8_CACHE, 1, weights, SCORE_ROW, values, dim, first, end, out, stride)


@kernel_njit
def page_values(cache, weights, n_rows, values, dim, first_end, group, out):
    """out += weights times the values of one page that each row sees: four rows where all see them.

    first_end: tokens of the page that row 0 sees, may be negative or beyond the page; `group` rows
    later it is one more.
    """
    row = 0
    while row < n_rows:
        rows = 4 if n_rows - row >= 4 else 1
        shared = 0
        if rows == 4:
            shared = min(PAGE_TOKENS, max(0, first_end + row // group))
            weigh_four(
                cache, weights + SCORE_ROW * row, values, dim, 0, shared, out + 4 * dim * row
            )
        for r in range(row, row + rows):
            end = min(PAGE_TOKENS, max(0, first_end + r // group))
            if end > shared:
                weigh_one(
                    cache, weights + SCORE_ROW * r, values, dim, shared, end, out + 4 * dim * r
                )
        row += rows


@kernel_njit
def window_values(cache, weights, n_rows, values, dim, first_end, window, group, out):
    """As `page_values`, but a row sees only the `window` tokens before its end."""
    for row in range(0, n_rows, 4):
        rows = min(4, n_rows - row)
        # The row that starts last and the one that ends first bound what all four see.
        begin = max(0, first_end + (row + rows - 1) // group - window)
        end = min(PAGE_TOKENS, first_end + row // group)
        shared = rows == 4 and begin < end
        for r in range(row, row + rows):
            r_begin = max(0, first_end + r // group - window)
            r_end = min(PAGE_TOKENS, first_end + r // group)
            if shared:
                r_end = begin
            if r_begin < r_end:
                at = 4 * dim * r
                weigh_one(cache, weights + SCORE_ROW * r, values, dim, r_begin, r_end, out + at)
        if not shared:
            continue
        weigh_four(cache, weights + SCORE_ROW * row, values, dim, begin, end, out + 4 * dim * row)
        for r in range(row, row + rows):
            r_end = min(PAGE_TOKENS, first_end + r // group)
            if end < r_end:
                at = 4 * dim * r
                weigh_one(cache, weights + SCORE_ROW * r, values, dim, end, r_end, out + at)


@kernel_njit
def widened(cache, room, n_rows, values, n):
    """(cache type, address) of the `n` numbers of a page: half-precision ones that many rows read
    are converted once into `room`, which changes no bit."""
    if cache != F16_CACHE or n_rows < WIDEN_ROWS:
        return cache, values
    widen_f16(room, values, n)
    return F32_CACHE, room
