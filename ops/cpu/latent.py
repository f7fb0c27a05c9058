"""Around latent attention: one cached row of each token, and products of a matrix for each head.

`latent_heads` norms and stores a token's row and lays the rotated part of its queries out;
`head_products` multiplies every head's numbers with the matrix of that head, which makes queries
from what `latent_heads` scaled, and values from what attention gave.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.activation import quantize_row
from ops.cpu.heads import ROPE_NONE, rotate, store_value
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.linear import MATRIX, multiply
from ops.cpu.memory import array, load_i32, load_i64, store_i64
from ops.cpu.norm import rms_scale
from ops.cpu.rows import scale_by_row, scale_row

LATENT_HEADS = args_record(
    "latent heads",
    q="i8",
    q_stride="i8",
    n_head="i8",
    dim_nope="i8",
    dim_rope="i8",
    dim_latent="i8",
    row="i8",
    row_stride="i8",
    row_dim="i8",
    norm="i8",
    queries="i8",
    queries_stride="i8",
    rope_kind="i8",
    n_rot="i8",
    cosines="i8",
    sines="i8",
    positions="i8",
    cell_pages="i8",
    error="i8",
    cache="i8",
    pages="i8",
    page_bytes="i8",
    eps="f4",
    q_scale="f4",
)
"""q: f32 rows of n_head * (dim_nope + dim_rope), scaled in place; strides: bytes a token.

row             f32 rows [latent | key part], changed in place, padded with zeros to row_dim numbers
norm            f32[dim_latent], weight of the latent's RMS norm
queries         f32 rows of n_head * row_dim; their last dim_rope before the padding are written
cosines, sines  f32[position][n_rot / 2]
cell_pages      i32[n_tokens]: the page that holds each token
error           i64 that is set to 1 where that is no page
cache, ...      the type of the pages, where they are and how large; a row is laid out as a value
"""

HEAD_PRODUCTS = args_record(
    "head products",
    matrix="i8",
    n_rows="i8",
    n_in="i8",
    rows_per_chunk="i8",
    group="i8",
    tokens="i8",
    n_tokens="i8",
    x="i8",
    x_stride="i8",
    x_head_bytes="i8",
    y="i8",
    y_stride="i8",
    y_head_bytes="i8",
    record_bytes="i8",
    scratch="i8",
    scratch_bytes="i8",
)
"""y[token][head] = matrix[head] x[token][head], f32 rows; chunks: of rows within heads.

matrix    a MATRIX of one slab of n_rows a head
group     values under one scale of an activation record of n_in; 1: x is multiplied as it is
tokens    i32: the token of each of the n_tokens (address of an i64) rows; 0: row i is token i
scratch   of each worker: pointers, records and the room of a product
"""

BATCH_TOKENS = 64
POINTERS = 8 * BATCH_TOKENS


def head_products_scratch(record_bytes: int) -> int:
    """Bytes that a worker needs besides the room of a product."""
    return 2 * POINTERS + BATCH_TOKENS * record_bytes


@job_kernel
def latent_heads(args: int, chunk: int, worker: int) -> None:
    """One token: see the module."""
    a = array(args, 1, LATENT_HEADS)[0]
    position = np.int64(load_i32(a.positions + 4 * chunk))
    q, row = a.q + chunk * a.q_stride, a.row + chunk * a.row_stride
    dim = a.dim_nope + a.dim_rope
    scale_row(q, q, a.n_head * dim, a.q_scale)
    scale_by_row(row, row, a.norm, a.dim_latent, rms_scale(row, a.dim_latent, a.eps))
    key_part = row + 4 * a.dim_latent
    cosines, sines = a.cosines + 2 * a.n_rot * position, a.sines + 2 * a.n_rot * position
    if a.rope_kind != ROPE_NONE:
        rotate(key_part, 1, a.dim_rope, a.rope_kind, a.n_rot, cosines, sines)
    for head in range(a.n_head):
        source = q + 4 * (head * dim + a.dim_nope)
        target = a.queries + chunk * a.queries_stride + 4 * (head * a.row_dim + a.dim_latent)
        scale_row(target, source, a.dim_rope, np.float32(1))
        if a.rope_kind != ROPE_NONE:
            rotate(target, 1, a.dim_rope, a.rope_kind, a.n_rot, cosines, sines)
    page = np.int64(load_i32(a.cell_pages + 4 * chunk))
    if page < 0:
        store_i64(a.error, 1)
        return
    to = a.pages + page * a.page_bytes
    store_value(a.cache, row, a.row_dim, a.row_dim, to, position % PAGE_TOKENS)


@kernel_njit
def head_batch(a, head, first_row, end_row, first, n, scratch):
    """Some output rows of one head for up to BATCH_TOKENS rows from `first` on."""
    x_ptrs, y_ptrs, records = scratch, scratch + POINTERS, scratch + 2 * POINTERS
    for i in range(n):
        token = np.int64(first + i)
        if a.tokens != 0:
            token = np.int64(load_i32(a.tokens + 4 * token))
        x = a.x + token * a.x_stride + head * a.x_head_bytes
        if a.group != 1:
            made = records + i * a.record_bytes
            quantize_row(a.group, x, a.n_in, made)
            x = made
        store_i64(x_ptrs + 8 * i, x)
        store_i64(y_ptrs + 8 * i, a.y + token * a.y_stride + head * a.y_head_bytes)
    matrix = array(a.matrix, 1, MATRIX)[0]
    room = records + BATCH_TOKENS * a.record_bytes
    multiply(matrix, head, first_row, end_row, x_ptrs, y_ptrs, n, room)


@job_kernel
def head_products(args: int, chunk: int, worker: int) -> None:
    """Some rows of one head's matrix for all rows of the step."""
    a = array(args, 1, HEAD_PRODUCTS)[0]
    per_head = (a.n_rows + a.rows_per_chunk - 1) // a.rows_per_chunk
    head, part = chunk // per_head, chunk % per_head
    first_row = part * a.rows_per_chunk
    end_row = min(a.n_rows, first_row + a.rows_per_chunk)
    scratch = a.scratch + worker * a.scratch_bytes
    n_tokens, first = load_i64(a.n_tokens), 0
    while first < n_tokens:
        n = min(BATCH_TOKENS, n_tokens - first)
        head_batch(a, head, first_row, end_row, first, n, scratch)
        first += n
