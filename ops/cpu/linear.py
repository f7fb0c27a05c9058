"""Dense matrix products as one job: matrices that meet the same tokens, cut into ranges of rows."""

from __future__ import annotations

import numpy as np

from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.memory import array, call, load_f32, load_i64, store_i32
from ops.cpu.rows import add_row, is_finite_row, scale_row

MATRIX = args_record(
    "matrix",
    matmul="i8",
    weights="i8",
    row_bytes="i8",
    n_elems="i8",
    slab_bytes="i8",
    bias="i8",
    bias_slab_bytes="i8",
    scale="i8",
)
"""A matrix, or a stack of them `slab_bytes` apart, one for each expert.

matmul  address of the compiled product, see `ops.cpu.matmul`
bias    f32[n_rows] (of each expert), added; 0: none
scale   f32 (of each expert) that multiplies the product before the bias; 0: none
"""

PART = args_record(
    "part",
    matrix="i8",
    n_rows="i8",
    x_ptrs="i8",
    y_ptrs="i8",
    rows_per_chunk="i8",
    end_chunk="i8",
)
"""One matrix of the job.  x_ptrs, y_ptrs: i64 addresses, of each token's activation record and f32
results.  end_chunk: the first chunk of the next part."""
PART_BYTES = PART.itemsize

PRODUCTS = args_record(
    "products",
    parts="i8",
    n_tokens="i8",
    scratch="i8",
    scratch_bytes="i8",
    not_finite="i8",
)
"""n_tokens: address of an i64; not_finite: i32 flags, one of any token and then one of each, set
where a result is NaN or infinite; 0: not looked at."""


@kernel_njit
def multiply(matrix, expert, first_row, end_row, x_ptrs, y_ptrs, n_tokens, scratch):
    """y[t][row] for a range of rows, scaled and with the bias."""
    weights = matrix.weights + expert * matrix.slab_bytes
    call(
        matrix.matmul,
        (
            weights,
            matrix.row_bytes,
            first_row,
            end_row,
            matrix.n_elems,
            x_ptrs,
            y_ptrs,
            n_tokens,
            scratch,
        ),
    )
    if matrix.scale == 0 and matrix.bias == 0:
        return
    n = end_row - first_row
    for t in range(n_tokens):
        y = load_i64(y_ptrs + 8 * t) + 4 * first_row
        if matrix.scale != 0:
            scale_row(y, y, n, load_f32(matrix.scale + 4 * expert))
        if matrix.bias != 0:
            add_row(y, matrix.bias + expert * matrix.bias_slab_bytes + 4 * first_row, n)


@job_kernel
def products(args: int, chunk: int, worker: int) -> None:
    """The rows of one chunk for all tokens."""
    a = array(args, 1, PRODUCTS)[0]
    at, first_chunk = a.parts, 0
    part = array(at, 1, PART)[0]
    while chunk >= part.end_chunk:
        first_chunk = part.end_chunk
        at += PART_BYTES
        part = array(at, 1, PART)[0]
    first_row = (chunk - first_chunk) * part.rows_per_chunk
    end_row = min(part.n_rows, first_row + part.rows_per_chunk)
    n_tokens = load_i64(a.n_tokens)
    scratch = a.scratch + worker * a.scratch_bytes
    matrix = array(part.matrix, 1, MATRIX)[0]
    multiply(matrix, 0, first_row, end_row, part.x_ptrs, part.y_ptrs, n_tokens, scratch)
    if a.not_finite != 0:
        for t in range(n_tokens):
            y = load_i64(part.y_ptrs + 8 * t) + 4 * first_row
            if not is_finite_row(y, end_row - first_row):
                store_i32(a.not_finite, np.int32(1))
                store_i32(a.not_finite + 4 + 4 * t, np.int32(1))
