"""Several residual streams a token: what a block reads of them, and how its result returns.

A chunk is one row.  Each of the three kinds of mixing is cut where a product comes between:

    enter_streams     the last block's result into the streams; what the first product reads
    gated_low         between the two products of gated streams
    gated_input, sinkhorn_input     the block's input
"""

from __future__ import annotations

import numpy as np

from ops.cpu.elementwise import sigmoid
from ops.cpu.gates import add_gated, silu_row
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.memory import array, load_f32
from ops.cpu.norm import LAST_BLOCK, add_experts, rms_scale, row_token, store_forms
from ops.cpu.rows import add_row, add_weighted, scale_by_row, scale_row
from ops.cpu.sinkhorn import sinkhorn

NO_STREAMS, GATED, SINKHORN, MEAN = 0, 1, 2, 3

STREAMS = args_record(
    "streams",
    x="i8",
    x_stride="i8",
    n="i8",
    n_stream="i8",
    **LAST_BLOCK,
    returning="i8",
    returns="i8",
    returns_stride="i8",
    returns_by_token="i8",
    kind="i8",
    norm="i8",
    scratch="i8",
    scratch_bytes="i8",
    flat="i8",
    flat_stride="i8",
    low="i8",
    low_stride="i8",
    n_low="i8",
    gate="i8",
    gate_stride="i8",
    mix="i8",
    mix_stride="i8",
    mix_base="i8",
    mix_scale="i8",
    n_iterations="i8",
    out_f32="i8",
    out_f32_stride="i8",
    out_q8_256="i8",
    out_q8_256_stride="i8",
    out_q8_32="i8",
    out_q8_32_stride="i8",
    eps="f4",
    epsilon="f4",
)
"""x, tokens, delta to moe_sum: see `ops.cpu.norm.NORM`; a row of x is n_stream streams of n values.

returning     kind of the mix that the last block's result returns by; NO_STREAMS: nothing returns
returns       f32 rows: what `inject` gave, or (post[n_stream], C[n_stream][n_stream])
returns_by_token   whether their rows are tokens, not chunks
scratch       f32[n_workers][1 + n_stream][n]
flat          f32 rows: what the first product reads, of n_stream * n values
low           f32 rows of n_low values, between the products
gate, mix     f32 rows that the last product gave
norm          f32[n_stream][n] of gated streams, else f32[n]
out_*         the form of the job's result that the next product reads
"""


@kernel_njit
def return_result(a, chunk, token, x, room):
    """Put the last block's result into the streams at x; room: f32[1 + n_stream][n]."""
    y, mixed = room, room + 4 * a.n
    clear(y, 4 * a.n)
    if a.delta != 0:
        add_row(y, a.delta + chunk * a.delta_stride, a.n)
    if a.moe_sum != 0:
        add_experts(a, chunk, y)
    index = token if a.returns_by_token else np.int64(chunk)
    factors = a.returns + index * a.returns_stride
    if a.returning == GATED:
        for s in range(a.n_stream):
            value = load_f32(factors + 4 * s) / np.float32(a.n_stream)
            add_weighted(x + 4 * s * a.n, y, a.n, np.float32(2) * sigmoid(value))
        return
    matrix = factors + 4 * a.n_stream
    for to in range(a.n_stream):
        row = mixed + 4 * to * a.n
        scale_row(row, y, a.n, load_f32(factors + 4 * to))
        for source in range(a.n_stream):
            weight = load_f32(matrix + 4 * (source * a.n_stream + to))
            add_weighted(row, x + 4 * source * a.n, a.n, weight)
    scale_row(x, mixed, a.n_stream * a.n, np.float32(1))


@job_kernel
def enter_streams(args: int, chunk: int, worker: int) -> None:
    """Return the last result, and write what the mix's first product reads; see the module."""
    a = array(args, 1, STREAMS)[0]
    token = row_token(a, chunk)
    x = a.x + token * a.x_stride
    room = a.scratch + worker * a.scratch_bytes
    if a.returning != NO_STREAMS:
        return_result(a, chunk, token, x, room)
    total = a.n_stream * a.n
    flat = a.flat + chunk * a.flat_stride
    if a.kind == GATED:
        for s in range(a.n_stream):
            at = 4 * s * a.n
            scale_by_row(flat + at, x + at, a.norm + at, a.n, rms_scale(x + at, a.n, a.eps))
        store_forms(a, chunk, flat, total)
    elif a.kind == SINKHORN:
        scale_row(flat, x, total, rms_scale(x, total, a.eps))
        store_forms(a, chunk, flat, total)
    elif a.kind == MEAN:
        scale_row(room, x, a.n, np.float32(1))
        for s in range(1, a.n_stream):
            add_row(room, x + 4 * s * a.n, a.n)
        scale_row(room, room, a.n, np.float32(1) / np.float32(a.n_stream))
        normed_input(a, chunk, room)


@kernel_njit
def normed_input(a, chunk, row):
    """The block's input: RMS norm of f32[n] at `row`."""
    out = a.out_f32 + chunk * a.out_f32_stride
    scale_by_row(out, row, a.norm, a.n, rms_scale(row, a.n, a.eps))
    store_forms(a, chunk, out, a.n)


@job_kernel
def gated_low(args: int, chunk: int, worker: int) -> None:
    """low = silu(low / n_stream), in place, and its stored forms."""
    a = array(args, 1, STREAMS)[0]
    low = a.low + chunk * a.low_stride
    scale_row(low, low, a.n_low, np.float32(1) / np.float32(a.n_stream))
    silu_row(low, low, a.n_low)
    store_forms(a, chunk, low, a.n_low)


@job_kernel
def gated_input(args: int, chunk: int, worker: int) -> None:
    """The block's input: the mean over streams of flat * sigmoid(gate)."""
    a = array(args, 1, STREAMS)[0]
    flat, gate = a.flat + chunk * a.flat_stride, a.gate + chunk * a.gate_stride
    out = a.out_f32 + chunk * a.out_f32_stride
    clear(out, 4 * a.n)
    for s in range(a.n_stream):
        add_gated(out, flat + 4 * s * a.n, gate + 4 * s * a.n, a.n)
    scale_row(out, out, a.n, np.float32(1) / np.float32(a.n_stream))
    store_forms(a, chunk, out, a.n)


@job_kernel
def sinkhorn_input(args: int, chunk: int, worker: int) -> None:
    """The block's input: the norm of the weighted sum of streams; and how its result returns."""
    a = array(args, 1, STREAMS)[0]
    x = a.x + row_token(a, chunk) * a.x_stride
    mix = a.mix + chunk * a.mix_stride
    sinkhorn(mix, a.mix_base, a.mix_scale, a.n_stream, a.n_iterations, a.epsilon)
    room = a.scratch + worker * a.scratch_bytes
    clear(room, 4 * a.n)
    for s in range(a.n_stream):
        add_weighted(room, x + 4 * s * a.n, a.n, load_f32(mix + 4 * s))
    normed_input(a, chunk, room)


@job_kernel
def spread_streams(args: int, chunk: int, worker: int) -> None:
    """Every stream becomes the first one, the token's embedding."""
    a = array(args, 1, STREAMS)[0]
    x = a.x + np.int64(chunk) * a.x_stride
    for s in range(1, a.n_stream):
        scale_row(x + 4 * s * a.n, x, a.n, np.float32(1))
