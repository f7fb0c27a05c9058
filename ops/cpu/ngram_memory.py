"""Rows of an n-gram table, gated by the streams that they are added to.

A chunk is one token.
"""

from __future__ import annotations

import math

import numpy as np

from ops.cpu.elementwise import sigmoid
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.memory import array
from ops.cpu.norm import rms_scale
from ops.cpu.rows import add_row, scale_by_row, scale_row
from ops.cpu.vector import dot

NGRAM_MEMORY = args_record(
    "ngram memory",
    x="i8",
    x_stride="i8",
    n="i8",
    n_stream="i8",
    key="i8",
    key_stride="i8",
    value="i8",
    value_stride="i8",
    key_norm="i8",
    query_norm="i8",
    conv_norm="i8",
    out="i8",
    out_stride="i8",
    scratch="i8",
    eps="f4",
)
"""See `runtime.models.ngram_memory.NgramMemorySpec`; f32 rows, strides are bytes a token.

x        the residual streams, to which the gated values are added
key      rows of n_stream * n values, changed in place;  value: of n values
out      rows of n_stream * n values: what the convolution reads
scratch  f32[n_workers][n]
"""
SMALLEST = np.float32(1e-6)


@kernel_njit
def gate_of(d):
    """sigmoid(sign(d) * sqrt(max(|d|, SMALLEST)))."""
    root = np.sqrt(max(abs(d), SMALLEST))
    if d < np.float32(0):
        return sigmoid(-root)
    return sigmoid(root) if d > np.float32(0) else np.float32(0.5)


@job_kernel
def gate_memory(args: int, chunk: int, worker: int) -> None:
    """One token: see the module."""
    a = array(args, 1, NGRAM_MEMORY)[0]
    n, query = a.n, a.scratch + 4 * worker * a.n
    value = a.value + chunk * a.value_stride
    for s in range(a.n_stream):
        at = 4 * s * n
        x, key = a.x + chunk * a.x_stride + at, a.key + chunk * a.key_stride + at
        scale_by_row(key, key, a.key_norm + at, n, rms_scale(key, n, a.eps))
        scale_by_row(query, x, a.query_norm + at, n, rms_scale(x, n, a.eps))
        d = dot(key, query, n) / np.float32(math.sqrt(n))
        out = a.out + chunk * a.out_stride + at
        scale_row(out, value, n, gate_of(d))
        add_row(x, out, n)
        scale_by_row(out, out, a.conv_norm + at, n, rms_scale(out, n, a.eps))
