"""Causal attention over paged keys and values: online softmax over blocks of 512 keys.

Blocks start at absolute positions, so a token's bits depend neither on the tokens beside it nor on
how its prompt was cut, nor on who computes which block.  A chunk is one work item and kv head: a
tile of prompt tokens over all its blocks, or one token over some of its blocks (then the blocks are
merged, in order, by `attention_end`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.attention_rows import SCORE_ROW, page_scores, page_values, widened
from ops.cpu.elementwise import exp, exp_minus
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.kv_layout import BLOCK_TOKENS, PAGE_TOKENS
from ops.cpu.memory import array, load_f32, load_i32, store_f32, store_i64
from ops.cpu.program import address_of, aligned
from ops.cpu.rows import merge_row, scale_row
from ops.cpu.vector import max16, sum16

BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
TILE_ROWS = 32
MINUS_INFINITY = np.float32(-np.inf)
PARTIAL_HEAD = 64
"""Bytes before the values of a partial result: its peak and its sum, f32 each."""

ITEM = np.dtype(
    [
        ("token", "i4"),
        ("n_tokens", "i4"),
        ("first_block", "i4"),
        ("end_block", "i4"),
        ("partial", "i4"),
    ]
)
"""Tokens [token, token + n_tokens) of one sequence over some blocks.

partial: -1 writes the finished output; otherwise each block's partial result goes to this row of
the partials and those after it.
"""
ITEM_BYTES = ITEM.itemsize

ATTENTION = args_record(
    "attention",
    items="i8",
    n_head="i8",
    n_head_kv="i8",
    dim_k="i8",
    dim_v="i8",
    dim_v_padded="i8",
    row_dim="i8",
    keys_are_rows="i8",
    q="i8",
    q_stride="i8",
    out="i8",
    out_stride="i8",
    positions="i8",
    sequences="i8",
    page_tables="i8",
    table_stride="i8",
    k_cache="i8",
    k_pages="i8",
    k_page_bytes="i8",
    k_head_bytes="i8",
    v_cache="i8",
    v_pages="i8",
    v_page_bytes="i8",
    v_head_bytes="i8",
    partials="i8",
    partial_bytes="i8",
    partial_spans="i8",
    error="i8",
    workspaces="i8",
    window="i8",
    sinks="i8",
    masks="i8",
    mask_stride="i8",
    reads_all="i8",
    value_scale="f4",
)
"""q: f32 rows of n_head * dim_k, scaled; out: f32 rows of n_head * dim_v; strides: bytes a token.

partials: rows of `partial_bytes`, in each for every head PARTIAL_HEAD bytes and f32[dim_v_padded];
partial_spans: i32[n_tokens][2], first partial of a token and how many; error: i64 that is set to 1
where a page table has no page.

row_dim: numbers of a value in its page, dim_v_padded but where a value is the first numbers of a
key; keys_are_rows: 1 where keys are laid out as values are, and dim_k is padded with zeros.

window: a key is seen while its position is above the query's minus this; 0: every earlier key.
sinks: f32[n_head], joins the softmax denominator of each head; 0: none.
value_scale: multiplies the output.
masks, reads_all: which keys a token reads, see `ops.cpu.indexer`; 0: every one that it sees.
"""

WORKSPACE = args_record(
    "attention workspace",
    queries="i8",
    scores="i8",
    values="i8",
    peaks="i8",
    totals="i8",
    block_values="i8",
    block_peaks="i8",
    block_totals="i8",
    block_reads="i8",
    page="i8",
)
"""A worker's arrays for up to `n_rows` query rows: i64 queries[row], i32 block_reads, f32 the rest.

page: room for one page of one head as f32.
"""
WORKSPACE_BYTES = WORKSPACE.itemsize


def attention_workspaces(
    n_workers: int, n_head: int, n_head_kv: int, dim: int
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """WORKSPACE[n_workers], and the arrays it points to; dim: of keys and values, the larger."""
    rows = max(TILE_ROWS, n_head // n_head_kv)
    columns = {name: 1 for name in WORKSPACE.names or ()}
    columns.update(scores=BLOCK_TOKENS, values=dim, block_values=dim, page=dim)
    workspaces = np.zeros(n_workers, WORKSPACE)
    arrays = []
    for name, width in columns.items():
        n_rows = PAGE_TOKENS if name == "page" else rows
        memory = aligned((n_workers, n_rows, width), "i8" if name == "queries" else "f4")
        workspaces[name] = [address_of(memory[worker]) for worker in range(n_workers)]
        arrays.append(memory)
    return workspaces, arrays


def tile_tokens(n_head: int, n_head_kv: int) -> int:
    """Prompt tokens of one work item."""
    return max(1, TILE_ROWS * n_head_kv // n_head)


@kernel_njit
def fill(row, begin, end, value):
    """Values [begin, end) of an f32 row."""
    for i in range(begin, end):
        store_f32(row + 4 * i, value)


@kernel_njit
def softmax_row(row, begin, end):
    """Scores [begin, end) of an f32 row -> e^(score - peak); (peak, sum).

    The values around them, up to multiples of 16, are overwritten.
    """
    first, last = begin // 16 * 16, (end + 15) // 16 * 16
    fill(row, first, begin, MINUS_INFINITY)
    fill(row, end, last, MINUS_INFINITY)
    peak = max16(row + 4 * first, last - first)
    exp_minus(row + 4 * first, last - first, peak)
    fill(row, first, begin, np.float32(0))
    fill(row, end, last, np.float32(0))
    return peak, sum16(row + 4 * first, last - first)


@kernel_njit
def merge(peak, total, values, new_peak, new_total, new_values, dim):
    """Add one block's result to the running one; the new (peak, total)."""
    top = new_peak if new_peak > peak else peak
    keep, take = exp(peak - top), exp(new_peak - top)
    merge_row(values, new_values, dim, keep, take)
    return top, keep * total + take * new_total


@kernel_njit
def begin(a, item, w, kv_head):
    """Addresses of the queries and empty running results of an item's rows."""
    group = a.n_head // a.n_head_kv
    n_rows = item.n_tokens * group
    for row in range(n_rows):
        head = kv_head * group + row % group
        token = np.int64(item.token + row // group)
        store_i64(w.queries + 8 * row, a.q + token * a.q_stride + head * a.dim_k * 4)
        store_f32(w.peaks + 4 * row, MINUS_INFINITY)
        store_f32(w.totals + 4 * row, np.float32(0))
    clear(w.values, n_rows * 4 * a.dim_v_padded)
    return n_rows


@kernel_njit
def page_at(pages, page_bytes, table, index):
    """Address of the `index`th page of a sequence."""
    return pages + np.int64(load_i32(table + 4 * index)) * page_bytes


@kernel_njit
def first_seen(window, position):
    """The first key that a query sees, both counted from the start of a block."""
    return max(0, position + 1 - window) if window > 0 else 0


@kernel_njit
def block_pages(a, item, block):
    """(address of the block's page table, position of the item's first token in the block, first
    page that is read, end); no pages and an error where one of them is gone."""
    table = a.page_tables + a.table_stride * load_i32(a.sequences + 4 * item.token)
    table += 4 * block * BLOCK_PAGES
    first = load_i32(a.positions + 4 * item.token) - block * BLOCK_TOKENS
    n_keys = min(BLOCK_TOKENS, first + item.n_tokens)
    end = (n_keys + PAGE_TOKENS - 1) // PAGE_TOKENS
    first_page = first_seen(a.window, first) // PAGE_TOKENS
    for p in range(first_page, end):
        if load_i32(table + 4 * p) < 0:
            store_i64(a.error, 1)
            return table, first, 0, 0
    return table, first, first_page, end


@kernel_njit
def block_softmax(a, w, n_rows, first):
    """Scores into weights, block_peaks, block_totals; a total of -1: a row that sees no key."""
    group = a.n_head // a.n_head_kv
    for row in range(n_rows):
        position = first + row // group
        begin, end = first_seen(a.window, position), min(BLOCK_TOKENS, position + 1)
        peak, total = MINUS_INFINITY, np.float32(-1)
        if begin < end:
            peak, total = softmax_row(w.scores + SCORE_ROW * row, begin, end)
        store_f32(w.block_peaks + 4 * row, peak)
        store_f32(w.block_totals + 4 * row, total)
    clear(w.block_values, n_rows * 4 * a.dim_v_padded)


@kernel_njit
def attend_block(a, item, w, kv_head, n_rows, block):
    """Results of one block into block_peaks, block_totals, block_values."""
    table, first, _, end_page = block_pages(a, item, block)
    for p in range(end_page):
        keys = page_at(a.k_pages, a.k_page_bytes, table, p) + kv_head * a.k_head_bytes
        cache, keys = widened(a.k_cache, w.page, n_rows, keys, PAGE_TOKENS * a.dim_k)
        page_scores(cache, w.queries, n_rows, keys, a.dim_k, w.scores + 4 * PAGE_TOKENS * p)
    block_softmax(a, w, n_rows, first)
    group, dim = a.n_head // a.n_head_kv, a.dim_v_padded
    for p in range(end_page):
        values = page_at(a.v_pages, a.v_page_bytes, table, p) + kv_head * a.v_head_bytes
        cache, values = widened(a.v_cache, w.page, n_rows, values, PAGE_TOKENS * dim)
        weights, seen = w.scores + 4 * PAGE_TOKENS * p, first + 1 - p * PAGE_TOKENS
        page_values(cache, weights, n_rows, values, dim, seen, group, w.block_values)


@kernel_njit
def store_partials(a, w, kv_head, n_rows, partial):
    """Keep the block's results of one token for `attention_end`."""
    for row in range(n_rows):
        head = kv_head * n_rows + row
        target = a.partials + partial * a.partial_bytes
        target += head * (PARTIAL_HEAD + 4 * a.dim_v_padded)
        store_f32(target, load_f32(w.block_peaks + 4 * row))
        store_f32(target + 4, load_f32(w.block_totals + 4 * row))
        values = w.block_values + 4 * a.dim_v_padded * row
        scale_row(target + PARTIAL_HEAD, values, a.dim_v_padded, np.float32(1))


@kernel_njit
def end_block(a, item, w, kv_head, n_rows, block):
    """Keep the block's results for later, or add them to the running ones."""
    if item.partial >= 0:
        store_partials(a, w, kv_head, n_rows, item.partial + block - item.first_block)
        return
    for row in range(n_rows):
        total = load_f32(w.block_totals + 4 * row)
        if total != np.float32(-1):
            offset = 4 * a.dim_v_padded * row
            peak, total = merge(
                load_f32(w.peaks + 4 * row), load_f32(w.totals + 4 * row), w.values + offset,
                load_f32(w.block_peaks + 4 * row), total, w.block_values + offset, a.dim_v_padded,
            )  # fmt: skip
            store_f32(w.peaks + 4 * row, peak)
            store_f32(w.totals + 4 * row, total)


@kernel_njit
def output_factor(a, head, peak, total):
    """What the sum of a head's weighted values is multiplied by, given the softmax so far."""
    if a.sinks == 0:
        return a.value_scale * (np.float32(1) / total)
    sink = load_f32(a.sinks + 4 * head)
    top = sink if sink > peak else peak
    keep = exp(peak - top)
    return a.value_scale * (keep / (keep * total + exp(sink - top)))


@kernel_njit
def end(a, item, w, kv_head, n_rows):
    """Write the finished outputs of an item, unless its results are merged later."""
    if item.partial >= 0:
        return
    group = a.n_head // a.n_head_kv
    for row in range(n_rows):
        head = kv_head * group + row % group
        target = a.out + (item.token + row // group) * a.out_stride + head * a.dim_v * 4
        peak, total = load_f32(w.peaks + 4 * row), load_f32(w.totals + 4 * row)
        factor = output_factor(a, head, peak, total)
        scale_row(target, w.values + 4 * a.dim_v_padded * row, a.dim_v, factor)


@job_kernel
def attention(args: int, chunk: int, worker: int) -> None:
    """One work item and kv head of the plain kind: keys in columns, no window."""
    a = array(args, 1, ATTENTION)[0]
    w = array(a.workspaces + worker * WORKSPACE_BYTES, 1, WORKSPACE)[0]
    item = array(a.items + ITEM_BYTES * (chunk // a.n_head_kv), 1, ITEM)[0]
    kv_head = chunk % a.n_head_kv
    n_rows = begin(a, item, w, kv_head)
    for block in range(item.first_block, item.end_block):
        attend_block(a, item, w, kv_head, n_rows, block)
        end_block(a, item, w, kv_head, n_rows, block)
    end(a, item, w, kv_head, n_rows)


@job_kernel
def attention_end(args: int, chunk: int, worker: int) -> None:
    """Merge the partial results of token `chunk`, in the order of the blocks."""
    a = array(args, 1, ATTENTION)[0]
    first = load_i32(a.partial_spans + 8 * chunk)
    n_partials = load_i32(a.partial_spans + 8 * chunk + 4)
    if n_partials == 0:
        return
    w = array(a.workspaces + worker * WORKSPACE_BYTES, 1, WORKSPACE)[0]
    for head in range(a.n_head):
        clear(w.values, 4 * a.dim_v_padded)
        peak, total = MINUS_INFINITY, np.float32(0)
        for i in range(n_partials):
            part = a.partials + (first + i) * a.partial_bytes
            part += head * (PARTIAL_HEAD + 4 * a.dim_v_padded)
            if load_f32(part + 4) != np.float32(-1):
                peak, total = merge(
                    peak, total, w.values,
                    load_f32(part), load_f32(part + 4), part + PARTIAL_HEAD, a.dim_v_padded,
                )  # fmt: skip
        target = a.out + chunk * a.out_stride + head * a.dim_v * 4
        scale_row(target, w.values, a.dim_v, output_factor(a, head, peak, total))
