"""RMS norm fused with what comes before and after it: residual, expert sum, activation records.

One chunk is one token.  The row of the residual stream gets the output of the last sub-block added;
the normalised row is stored in each form that the products after it want.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.activation import quantize_row
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.memory import array, load_f32, load_i32
from ops.cpu.rows import add_row, add_weighted, scale_by_row, scale_row
from ops.cpu.vector import dot

LAST_BLOCK = dict.fromkeys(
    (
        *("tokens", "delta", "delta_stride", "expert_out", "expert_stride", "slots", "weights"),
        *("n_used", "shared", "shared_stride", "shared_weights", "moe_sum", "moe_sum_stride"),
    ),
    "i8",
)
"""Fields of what a block gave, see NORM."""

NORM = args_record(
    "norm",
    x="i8",
    x_stride="i8",
    n="i8",
    **LAST_BLOCK,
    weight="i8",
    out_f32="i8",
    out_f32_stride="i8",
    out_q8_256="i8",
    out_q8_256_stride="i8",
    out_q8_32="i8",
    out_q8_32_stride="i8",
    eps="f4",
)
"""Addresses of 0 mean "not there".

x              residual stream, f32[n_tokens][n]
tokens         i32: the row of x of each chunk; 0: chunk i has row i
delta          f32[n_chunks][n], added to x
expert_out     f32 rows of the expert products; row slots[chunk][i] has the weight weights[chunk][i]
shared         f32[n_chunks][n], the shared expert, with the weight shared_weights[chunk] (0: one)
moe_sum        f32[n_chunks][n], room for the sum of expert outputs before it is added to x
weight         f32[n], of the norm; 0: only the residual is updated
out_*          the normalised row of chunk i as f32 or as an activation record
"""


@kernel_njit
def row_token(a, chunk):
    """The token of a chunk."""
    return np.int64(load_i32(a.tokens + 4 * chunk)) if a.tokens != 0 else np.int64(chunk)


@kernel_njit
def store_forms(a, chunk, row, n):
    """The activation records of f32[n] at `row` that are wanted."""
    if a.out_q8_256 != 0:
        quantize_row(256, row, n, a.out_q8_256 + chunk * a.out_q8_256_stride)
    if a.out_q8_32 != 0:
        quantize_row(32, row, n, a.out_q8_32 + chunk * a.out_q8_32_stride)


@kernel_njit
def add_experts(a, chunk, x):
    """x += the weighted expert outputs, one fma each in the router's order, the shared one last."""
    total = a.moe_sum + chunk * a.moe_sum_stride
    clear(total, 4 * a.n)
    for i in range(a.n_used):
        at = 4 * (chunk * a.n_used + i)
        slot = np.int64(load_i32(a.slots + at))
        row = a.expert_out + slot * a.expert_stride
        add_weighted(total, row, a.n, load_f32(a.weights + at))
    if a.shared != 0:
        weight = np.float32(1)
        if a.shared_weights != 0:
            weight = load_f32(a.shared_weights + 4 * chunk)
        add_weighted(total, a.shared + chunk * a.shared_stride, a.n, weight)
    add_row(x, total, a.n)


@kernel_njit
def rms_scale(x, n, eps):
    """1 / sqrt(mean of squares + eps) of f32[n] at an address."""
    return np.float32(1) / np.sqrt(dot(x, x, n) / np.float32(n) + eps)


@job_kernel
def norm(args: int, chunk: int, worker: int) -> None:
    """Residual and norm of one token: see NORM."""
    a = array(args, 1, NORM)[0]
    x = a.x + row_token(a, chunk) * a.x_stride
    if a.delta != 0:
        add_row(x, a.delta + chunk * a.delta_stride, a.n)
    if a.moe_sum != 0:
        add_experts(a, chunk, x)
    if a.weight == 0:
        return
    out = a.out_f32 + chunk * a.out_f32_stride
    scale_by_row(out, x, a.weight, a.n, rms_scale(x, a.n, a.eps))
    store_forms(a, chunk, out, a.n)


QUANTIZE = args_record(
    "quantize",
    x="i8",
    x_stride="i8",
    n="i8",
    tokens="i8",
    out_f32="i8",
    out_f32_stride="i8",
    out_q8_256="i8",
    out_q8_256_stride="i8",
    out_q8_32="i8",
    out_q8_32_stride="i8",
)
"""x: f32[n_tokens][n]; tokens: see NORM; out_*: copies or activation records, 0: not wanted."""


@job_kernel
def quantize(args: int, chunk: int, worker: int) -> None:
    """The activation records of the row of `chunk`."""
    a = array(args, 1, QUANTIZE)[0]
    x = a.x + row_token(a, chunk) * a.x_stride
    if a.out_f32 != 0:
        scale_row(a.out_f32 + chunk * a.out_f32_stride, x, a.n, np.float32(1))
    store_forms(a, chunk, x, a.n)
