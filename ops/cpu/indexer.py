"""Which blocks of tokens a query reads: keys of blocks as they fill up, scores, and the best ones.

`index_keys` takes a sequence a chunk, token after token: the keys of the block that is not complete
are in the sequence's state, those of complete blocks in the pages.  `index_queries` and
`select_blocks` take a token a chunk, `score_blocks` some of a token's blocks; one bit for each key
is left.  See `runtime.models.indexer.IndexerSpec`.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.elementwise import exp
from ops.cpu.heads import ROPE_NONE, rotate
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.memory import array, load_f32, load_i32, store_f32, store_i32, store_i64
from ops.cpu.norm import rms_scale
from ops.cpu.rows import add_row, scale_by_row, scale_row
from ops.cpu.selection import nth_largest
from ops.cpu.spans import SPAN, SPAN_BYTES
from ops.cpu.vector import dot, f32_at

INDEXER = args_record(
    "indexer",
    spans="i8",
    states="i8",
    state_bytes="i8",
    positions="i8",
    sequences="i8",
    page_tables="i8",
    table_stride="i8",
    pages="i8",
    page_bytes="i8",
    error="i8",
    n_head="i8",
    dim="i8",
    block="i8",
    n_best="i8",
    query="i8",
    query_stride="i8",
    query_norm="i8",
    key="i8",
    key_stride="i8",
    key_norm="i8",
    key_bias="i8",
    gate="i8",
    gate_stride="i8",
    pool_bias="i8",
    weight="i8",
    weight_stride="i8",
    rope_kind="i8",
    n_rot="i8",
    cosines="i8",
    sines="i8",
    scores="i8",
    max_blocks="i8",
    n_slices="i8",
    scratch="i8",
    masks="i8",
    mask_stride="i8",
    reads_all="i8",
    eps="f4",
    key_eps="f4",
    scale="f4",
)
"""Addresses of 0 mean "not there"; all numbers are f32, strides are bytes a token.

states       keys, then gates, f32[block][dim] each, of the block that is not complete
pages        f32[PAGE_TOKENS / block][dim] keys of blocks, of each page
query        rows of n_head * dim, changed in place;  key, gate: of dim, key is changed in place
weight       rows of n_head
pool_bias    f32[block][dim]
scores       f32[n_tokens][max_blocks]; scratch: f32[n_workers][max_blocks]
n_slices     chunks of `score_blocks` that a token's blocks are cut into
masks        i32 rows of one word a page: bit t is set where token t of the page is read
reads_all    i32[n_tokens]: 1 where every earlier token is read, whatever the masks say
"""


@kernel_njit
def layer_norm(x, n, weight, bias, eps):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in place."""
    values, total = f32_at(x), np.float32(0)
    for i in range(n):
        total += values[i]
    mean, square = total / np.float32(n), np.float32(0)
    for i in range(n):
        values[i] -= mean
        square += values[i] * values[i]
    scale_by_row(x, x, weight, n, np.float32(1) / np.sqrt(square / np.float32(n) + eps))
    add_row(x, bias, n)


@kernel_njit
def pool_by_gate(a, out, keys, gates):
    """out = per channel, the keys times the softmax over the block's tokens of gate + bias."""
    k, g, bias, y = f32_at(keys), f32_at(gates), f32_at(a.pool_bias), f32_at(out)
    for d in range(a.dim):
        peak = np.float32(-np.inf)
        for t in range(a.block):
            peak = max(peak, g[t * a.dim + d] + bias[t * a.dim + d])
        total, value = np.float32(0), np.float32(0)
        for t in range(a.block):
            e = exp(g[t * a.dim + d] + bias[t * a.dim + d] - peak)
            total += e
            value += e * k[t * a.dim + d]
        y[d] = value / total


@kernel_njit
def rotated(a, x, n_heads, position):
    """Rope of heads in place, where there is one."""
    if a.rope_kind != ROPE_NONE:
        at = 2 * a.n_rot * position
        rotate(x, n_heads, a.dim, a.rope_kind, a.n_rot, a.cosines + at, a.sines + at)


@kernel_njit
def block_key(a, out, keys, gates, position):
    """The key of the complete block whose first token is at `position`."""
    if a.gate != 0:
        pool_by_gate(a, out, keys, gates)
    else:
        clear(out, 4 * a.dim)
        for t in range(a.block):
            add_row(out, keys + 4 * t * a.dim, a.dim)
        scale_row(out, out, a.dim, np.float32(1) / np.float32(a.block))
    if a.key_bias == 0:
        scale_by_row(out, out, a.key_norm, a.dim, rms_scale(out, a.dim, a.eps))
    rotated(a, out, 1, position)


@kernel_njit
def key_address(a, table, block):
    """Where the key of a sequence's `block` is; 0 where its page is missing."""
    first = block * a.block
    page = np.int64(load_i32(table + 4 * (first // PAGE_TOKENS)))
    if page < 0:
        return np.int64(0)
    return a.pages + page * a.page_bytes + 4 * a.dim * (first % PAGE_TOKENS // a.block)


@job_kernel
def index_keys(args: int, chunk: int, worker: int) -> None:
    """Keys of the blocks that one sequence completes; see the module."""
    a = array(args, 1, INDEXER)[0]
    span = array(a.spans + SPAN_BYTES * chunk, 1, SPAN)[0]
    keys = a.states + np.int64(span.slot) * a.state_bytes
    gates = keys + 4 * a.block * a.dim
    table = a.page_tables + chunk * a.table_stride
    for i in range(span.n_tokens):
        token, position = np.int64(span.token + i), np.int64(span.position) + i
        place = position % a.block
        key = a.key + token * a.key_stride
        if a.key_bias != 0:
            layer_norm(key, a.dim, a.key_norm, a.key_bias, a.key_eps)
        scale_row(keys + 4 * place * a.dim, key, a.dim, np.float32(1))
        if a.gate != 0:
            gate = a.gate + token * a.gate_stride
            scale_row(gates + 4 * place * a.dim, gate, a.dim, np.float32(1))
        if place == a.block - 1:
            out = key_address(a, table, position // a.block)
            if out == 0:
                store_i64(a.error, 1)
                return
            block_key(a, out, keys, gates, position - place)


@kernel_njit
def block_score(a, query, weight, key):
    """The score of the block whose key is at an address."""
    total = np.float32(0)
    for head in range(a.n_head):
        value = max(np.float32(0), dot(query + 4 * head * a.dim, key, a.dim))
        if weight != 0:
            value *= load_f32(weight + 4 * head)
        total += value
    return total * a.scale


@kernel_njit
def read(mask, first, n_tokens):
    """Set the bits of tokens [first, first + n_tokens)."""
    for token in range(first, first + n_tokens):
        at = mask + 4 * (token // PAGE_TOKENS)
        store_i32(at, load_i32(at) | np.int32(1) << np.int32(token % PAGE_TOKENS))


@job_kernel
def index_queries(args: int, chunk: int, worker: int) -> None:
    """Whether a token has a choice, and then its queries as scores need them."""
    a = array(args, 1, INDEXER)[0]
    position = np.int64(load_i32(a.positions + 4 * chunk))
    reads_all = (position + 1) // a.block <= a.n_best
    store_i32(a.reads_all + 4 * chunk, np.int32(reads_all))
    if reads_all:
        return
    query = a.query + chunk * a.query_stride
    if a.query_norm != 0:
        for head in range(a.n_head):
            x = query + 4 * head * a.dim
            scale_by_row(x, x, a.query_norm, a.dim, rms_scale(x, a.dim, a.eps))
    rotated(a, query, a.n_head, position)


@job_kernel
def score_blocks(args: int, chunk: int, worker: int) -> None:
    """The scores of one slice of a token's blocks."""
    a = array(args, 1, INDEXER)[0]
    token, part = chunk // a.n_slices, chunk % a.n_slices
    if load_i32(a.reads_all + 4 * token):
        return
    n_blocks = (np.int64(load_i32(a.positions + 4 * token)) + 1) // a.block
    query = a.query + token * a.query_stride
    table = a.page_tables + a.table_stride * load_i32(a.sequences + 4 * token)
    weight = a.weight + token * a.weight_stride if a.weight != 0 else np.int64(0)
    scores = a.scores + 4 * token * a.max_blocks
    for block in range(part * n_blocks // a.n_slices, (part + 1) * n_blocks // a.n_slices):
        key = key_address(a, table, block)
        if key == 0:
            store_i64(a.error, 1)
            return
        store_f32(scores + 4 * block, block_score(a, query, weight, key))


@job_kernel
def select_blocks(args: int, chunk: int, worker: int) -> None:
    """What one token reads; see the module."""
    a = array(args, 1, INDEXER)[0]
    if load_i32(a.reads_all + 4 * chunk):
        return
    position = np.int64(load_i32(a.positions + 4 * chunk))
    scores = a.scores + 4 * chunk * a.max_blocks
    room = a.scratch + 4 * worker * a.max_blocks
    mark_best(a, scores, room, position, a.masks + chunk * a.mask_stride)


@kernel_njit
def mark_best(a, scores, room, position, mask):
    """Set the bits of the best blocks, the earlier ones of equals, and of the tokens after all."""
    n_blocks = (position + 1) // a.block
    scale_row(room, scores, n_blocks, np.float32(1))
    limit, n_equal = nth_largest(room, n_blocks, a.n_best)
    clear(mask, a.mask_stride)  # attention looks at the pages of later tokens too
    for block in range(n_blocks):
        score = load_f32(scores + 4 * block)
        if score > limit:
            read(mask, block * a.block, a.block)
        elif score == limit and n_equal > 0:
            n_equal -= 1
            read(mask, block * a.block, a.block)
    first = n_blocks * a.block
    read(mask, first, position + 1 - first)
