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
def weigh_four(cache, weights, row, values, row_dim, dim, begin, end, out):
    """Rows `row` to `row` + 3 of out += weights times tokens [begin, end) of the page.

    row_dim: numbers of a value in the page, of which the first dim are added up.
    """
    w, o, step = weights + SCORE_ROW * row, out + 4 * dim * row, 4 * dim
    if cache == F16_CACHE:
        weigh_values(F16_CACHE, 4, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)
    elif cache == F32_CACHE:
        weigh_values(F32_CACHE, 4, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)
    else:
        weigh_values(Q8_CACHE, 4, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)


@kernel_njit
def weigh_one(cache, weights, row, values, row_dim, dim, begin, end, out):
    """Row `row` of out += weights times tokens [begin, end) of the page."""
    w, o, step = weights + SCORE_ROW * row, out + 4 * dim * row, 4 * dim
    if cache == F16_CACHE:
        weigh_values(F16_CACHE, 1, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)
    elif cache == F32_CACHE:
        weigh_values(F32_CACHE, 1, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)
    else:
        weigh_values(Q8_CACHE, 1, w, SCORE_ROW, values, row_dim, dim, begin, end, o, step)


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
            weigh_four(cache, weights, row, values, dim, dim, 0, shared, out)
        for r in range(row, row + rows):
            end = min(PAGE_TOKENS, max(0, first_end + r // group))
            if end > shared:
                weigh_one(cache, weights, r, values, dim, dim, shared, end, out)
        row += rows


@kernel_njit
def widened(cache, room, n_rows, values, n):
    """(cache type, address) of the `n` numbers of a page: half-precision ones that many rows read
    are converted once into `room`, which changes no bit."""
    if cache != F16_CACHE or n_rows < WIDEN_ROWS:
        return cache, values
    widen_f16(room, values, n)
    return F32_CACHE, room
