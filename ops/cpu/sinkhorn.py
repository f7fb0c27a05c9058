"""The small numbers of streams that a nearly doubly stochastic matrix mixes."""

from __future__ import annotations

import numpy as np

from ops.cpu.elementwise import exp, sigmoid
from ops.cpu.job import kernel_njit
from ops.cpu.memory import array


@kernel_njit
def divide_lines(c, n, step, stride, epsilon):
    """Divide each of n lines of n numbers, `stride` apart inside, by (its sum + epsilon)."""
    for line in range(n):
        total = np.float32(0)
        for i in range(n):
            total += c[line * step + i * stride]
        for i in range(n):
            c[line * step + i * stride] /= total + epsilon


@kernel_njit
def softmax_lines(c, n, epsilon):
    """Softmax of each row of c[n][n], plus epsilon."""
    for row in range(n):
        peak = c[row * n]
        for i in range(1, n):
            peak = max(peak, c[row * n + i])
        total = np.float32(0)
        for i in range(n):
            c[row * n + i] = exp(c[row * n + i] - peak)
            total += c[row * n + i]
        for i in range(n):
            c[row * n + i] = c[row * n + i] / total + epsilon


@kernel_njit
def sinkhorn(mix, base_at, scale_at, n, n_iterations, epsilon):
    """mix f32[n + n + n * n] at an address becomes pre, post, C[from][to], in place.

    See `runtime.models.streams.SinkhornStreams`.
    """
    m = array(mix, n * (n + 2), np.float32)
    base = array(base_at, n * (n + 2), np.float32)
    scale = array(scale_at, 3, np.float32)
    for i in range(n):
        m[i] = sigmoid(m[i] * scale[0] + base[i]) + epsilon
        m[n + i] = np.float32(2) * sigmoid(m[n + i] * scale[1] + base[n + i])
    for i in range(2 * n, n * (n + 2)):
        m[i] = m[i] * scale[2] + base[i]
    c = m[2 * n :]
    softmax_lines(c, n, epsilon)
    divide_lines(c, n, 1, n, epsilon)
    for _ in range(n_iterations - 1):
        divide_lines(c, n, n, 1, epsilon)
        divide_lines(c, n, 1, n, epsilon)
