"""Causal depthwise convolution over a sequence's tokens, then silu; the taps reach into the past.

A chunk is one sequence and 256 channels; its tokens come one after the other.  The state holds the
inputs of the last tokens, the one at position p in row p modulo their number, so a token's bits do
not depend on how the prompt was cut.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.gates import fma_row, silu_row
from ops.cpu.job import args_record, clear, job_kernel
from ops.cpu.memory import array
from ops.cpu.rows import scale_row
from ops.cpu.spans import SPAN, SPAN_BYTES

CHANNELS = 256

CONVOLUTION = args_record(
    "convolution",
    spans="i8",
    states="i8",
    state_bytes="i8",
    x="i8",
    x_stride="i8",
    weights="i8",
    n_channels="i8",
    n_taps="i8",
    dilation="i8",
    scratch="i8",
)
"""x[t] = silu(sum over taps of weights[tap] * x[t - (n_taps - 1 - tap) * dilation]), in place.

states   f32[(n_taps - 1) * dilation][n_channels], of each slot, `state_bytes` apart
x        f32 rows of the step's tokens
weights  f32[n_taps][n_channels]
scratch  f32[n_workers][CHANNELS]
"""


@job_kernel
def convolution(args: int, chunk: int, worker: int) -> None:
    """One sequence and some channels: see the module."""
    a = array(args, 1, CONVOLUTION)[0]
    n_blocks = (a.n_channels + CHANNELS - 1) // CHANNELS
    span = array(a.spans + SPAN_BYTES * (chunk // n_blocks), 1, SPAN)[0]
    first = chunk % n_blocks * CHANNELS
    n = min(CHANNELS, a.n_channels - first)
    history = a.states + np.int64(span.slot) * a.state_bytes + 4 * first
    row_bytes, n_rows = 4 * a.n_channels, (a.n_taps - 1) * a.dilation
    if span.position == 0:
        for row in range(n_rows):
            clear(history + row * row_bytes, 4 * n)
    total = a.scratch + worker * 4 * CHANNELS
    for i in range(span.n_tokens):
        position = np.int64(span.position) + i
        x = a.x + np.int64(span.token + i) * a.x_stride + 4 * first
        clear(total, 4 * n)
        weights = a.weights + 4 * first
        for tap in range(a.n_taps - 1):
            row = (position + tap * a.dilation) % n_rows
            fma_row(total, weights, history + row * row_bytes, n)
            weights += row_bytes
        fma_row(total, weights, x, n)
        scale_row(history + position % n_rows * row_bytes, x, n, np.float32(1))
        silu_row(x, total, n)
