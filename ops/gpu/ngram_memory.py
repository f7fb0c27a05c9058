"""The GPU kernels of an n-gram table's rows: gated by the streams, convolved, added to them.

The headers of the texts have the parameters, `runtime.models.ngram_memory` the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.streams import BLOCKS, sigmoid
from ops.quants.block import F32

N_TAPS = 4
SMALLEST = 1e-6
CONVOLUTION_BLOCK = 128
CHANNELS = 4
"""That a thread of the convolution has."""

GATE_PARAMS = (
    *((name, "u64") for name in ("count", "x", "keys", "values")),
    *((name, "u64") for name in ("key_norm", "query_norm", "conv_norm", "u")),
    ("n", "u32"),
    ("eps", "f32"),
)
CONVOLUTION_PARAMS = (
    *((name, "u64") for name in ("counts", "rows", "spans", "states", "u", "taps", "x")),
    *((name, "u32") for name in ("slot_bytes", "n_channels", "dilation")),
)


def ngram_gate(block: int, *, overlapped: bool = False) -> Kernel:
    """A block a stream of a token, of `streams.block_of(n)` threads; grid (4, tokens)."""
    return Kernel(
        entry="ngram_gate",
        source="ngram_gate.ptx",
        defines=launch_defines(block, 1, overlapped),
        params=GATE_PARAMS,
        block=block,
        reference=gate_reference,
    )


def ngram_convolution(*, overlapped: bool = False) -> Kernel:
    """The dilated convolution over a sequence's tokens; grid `ngram_convolution_grid`."""
    return Kernel(
        entry="ngram_convolution",
        source="ngram_convolution.ptx",
        defines=launch_defines(CONVOLUTION_BLOCK, 4, overlapped),
        params=CONVOLUTION_PARAMS,
        block=CONVOLUTION_BLOCK,
        reference=convolution_reference,
    )


def ngram_convolution_grid(n_channels: int, n_tokens: int) -> tuple[int, int]:
    return -(-n_channels // (CHANNELS * CONVOLUTION_BLOCK)), n_tokens


def gate_reference(
    x: F32, keys: F32, values: F32, key_norm: F32, query_norm: F32, conv_norm: F32, eps: float
) -> tuple[F32, F32]:
    """(streams, what is convolved), both f32[rows, 4, n]; values f32[rows, n], norms f32[4, n]."""

    def normed(rows: NDArray[Any], weight: F32) -> NDArray[np.float64]:
        wide = rows.astype(np.float64)
        result: NDArray[np.float64] = (
            wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight
        )
        return result

    products = normed(keys, key_norm) * normed(x, query_norm)
    d = products.sum(axis=-1) / np.sqrt(x.shape[-1])
    gate = sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), SMALLEST)))
    v = gate[..., None] * values[:, None]
    return (x + v).astype(np.float32), normed(v, conv_norm).astype(np.float32)


def convolution_reference(u: F32, history: F32, taps: F32, dilation: int) -> F32:
    """silu of the convolution of u f32[n, channels] of one sequence.

    history f32[3 * dilation, channels]: the inputs before, the oldest first.
    """
    window, n = np.concatenate([history, u]).astype(np.float64), len(u)
    parts = [window[i * dilation :][:n] * taps[:, i] for i in range(N_TAPS)]
    mixed = np.sum(parts, axis=0)
    result: F32 = (mixed / (1 + np.exp(-mixed))).astype(np.float32)
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every block, alone and overlapped."""
    for overlapped in (False, True):
        suffix = ", overlapped" if overlapped else ""
        for block in BLOCKS:
            yield f"ngram_gate ({block} threads{suffix})", ngram_gate(block, overlapped=overlapped)
        name = f"ngram_convolution{' (overlapped)' if overlapped else ''}"
        yield name, ngram_convolution(overlapped=overlapped)
