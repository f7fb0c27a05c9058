"""From the rows of Q, K and V to attention's inputs: head norms, rope, and the store into pages.

One chunk is one token.  Queries are scaled here, once, instead of every score later.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.kv_layout import F16_CACHE, F32_CACHE, PAGE_TOKENS, SCALE_DIMS
from ops.cpu.memory import array, load_i32, store_f32, store_i64
from ops.cpu.norm import rms_scale
from ops.cpu.rope import rotate_halves, rotate_neighbours
from ops.cpu.rows import narrow_f16, scale_by_row, scale_row, scatter_f16, store_i8
from ops.cpu.vector import f32_at

NORM_NONE, NORM_HEAD, NORM_ROW = 0, 1, 2
ROPE_NONE, ROPE_NEOX, ROPE_NORM = 0, 1, 2
Q8_MAX = np.float32(127)

HEADS = args_record(
    "heads",
    q="i8",
    k="i8",
    v="i8",
    row_stride="i8",
    n_head="i8",
    n_head_kv="i8",
    dim_k="i8",
    dim_v="i8",
    dim_v_padded="i8",
    norm_kind="i8",
    q_norm="i8",
    k_norm="i8",
    rope_kind="i8",
    n_rot="i8",
    cosines="i8",
    sines="i8",
    positions="i8",
    cell_pages="i8",
    error="i8",
    k_cache="i8",
    k_pages="i8",
    k_page_bytes="i8",
    k_head_bytes="i8",
    v_cache="i8",
    v_pages="i8",
    v_page_bytes="i8",
    v_head_bytes="i8",
    eps="f4",
    q_scale="f4",
)
"""q, k, v: f32 rows of a token `row_stride` bytes apart, changed in place.

cosines, sines  f32[position][n_rot / 2]
cell_pages      i32[n_tokens]: the page that holds each token
error           i64 that is set to 1 where that is no page
"""


@kernel_njit
def norm_heads(row, n_heads, dim, weight, kind, eps):
    """RMS norm of each head, or of all heads together, in place."""
    if kind == NORM_ROW:
        n = n_heads * dim
        scale_by_row(row, row, weight, n, rms_scale(row, n, eps))
    elif kind == NORM_HEAD:
        for head in range(n_heads):
            x = row + 4 * head * dim
            scale_by_row(x, x, weight, dim, rms_scale(x, dim, eps))


@kernel_njit
def rotate(row, n_heads, dim, kind, n_rot, cosines, sines):
    """Rope of each head in place."""
    for head in range(n_heads):
        x = row + 4 * head * dim
        if kind == ROPE_NEOX:
            rotate_halves(x, n_rot // 2, cosines, sines)
        else:
            rotate_neighbours(x, n_rot // 2, cosines, sines)


@kernel_njit
def scale_of_group(x, first, n):
    """amax / 127 of n values, and 127 / amax; a NaN or an infinity makes both NaN."""
    amax = np.float32(0)
    poison = np.float32(0)
    for i in range(first, first + n):
        amax = max(amax, abs(x[i]))
        poison += x[i] * np.float32(0)
    if amax < np.float32(1e-30):
        return poison, np.float32(0)
    return amax / Q8_MAX + poison, Q8_MAX / amax


@kernel_njit
def store_key(cache, x, dim, page, cell):
    """One head's key f32[dim] into column `cell` of its page."""
    values = f32_at(x)
    if cache == F32_CACHE:
        for d in range(dim):
            store_f32(page + 4 * (d * PAGE_TOKENS + cell), values[d])
    elif cache == F16_CACHE:
        scatter_f16(page + 2 * cell, 2 * PAGE_TOKENS, x, dim)
    else:
        for group in range(dim // SCALE_DIMS):
            first = group * SCALE_DIMS
            scale, inverse = scale_of_group(values, first, SCALE_DIMS)
            scales = page + dim * PAGE_TOKENS
            store_f32(scales + 4 * (group * PAGE_TOKENS + cell), scale)
            for d in range(first, first + SCALE_DIMS):
                q = np.int64(np.rint(values[d] * inverse)) if scale == scale else np.int64(0)
                store_i8(page + d * PAGE_TOKENS + cell, q)


@kernel_njit
def store_value(cache, x, dim, padded, page, cell):
    """One head's value f32[dim] into row `cell` of its page."""
    values = f32_at(x)
    if cache == F32_CACHE:
        scale_row(page + 4 * cell * padded, x, dim, np.float32(1))
    elif cache == F16_CACHE:
        narrow_f16(page + 2 * cell * padded, x, dim)
    else:
        n_groups = dim // SCALE_DIMS
        for group in range(n_groups):
            first = group * SCALE_DIMS
            scale, inverse = scale_of_group(values, first, SCALE_DIMS)
            scales = page + dim * PAGE_TOKENS
            store_f32(scales + 4 * (cell * n_groups + group), scale)
            for d in range(first, first + SCALE_DIMS):
                q = np.int64(np.rint(values[d] * inverse)) if scale == scale else np.int64(0)
                store_i8(page + cell * dim + d, q)


@job_kernel
def heads(args: int, chunk: int, worker: int) -> None:
    """One token: see the module."""
    a = array(args, 1, HEADS)[0]
    position = np.int64(load_i32(a.positions + 4 * chunk))
    q, k, v = (a.q + chunk * a.row_stride, a.k + chunk * a.row_stride, a.v + chunk * a.row_stride)
    norm_heads(q, a.n_head, a.dim_k, a.q_norm, a.norm_kind, a.eps)
    norm_heads(k, a.n_head_kv, a.dim_k, a.k_norm, a.norm_kind, a.eps)
    if a.rope_kind != ROPE_NONE:
        cosines = a.cosines + 2 * a.n_rot * position
        sines = a.sines + 2 * a.n_rot * position
        rotate(q, a.n_head, a.dim_k, a.rope_kind, a.n_rot, cosines, sines)
        rotate(k, a.n_head_kv, a.dim_k, a.rope_kind, a.n_rot, cosines, sines)
    scale_row(q, q, a.n_head * a.dim_k, a.q_scale)
    page = np.int64(load_i32(a.cell_pages + 4 * chunk))
    if page < 0:
        store_i64(a.error, 1)
        return
    cell = position % PAGE_TOKENS
    for head in range(a.n_head_kv):
        keys = a.k_pages + page * a.k_page_bytes + head * a.k_head_bytes
        values = a.v_pages + page * a.v_page_bytes + head * a.v_head_bytes
        store_key(a.k_cache, k + 4 * head * a.dim_k, a.dim_k, keys, cell)
        store_value(a.v_cache, v + 4 * head * a.dim_v, a.dim_v, a.dim_v_padded, values, cell)
