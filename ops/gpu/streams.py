"""The GPU kernels of models with several residual streams: what blocks read, how results return.

    enter_streams   the last block's result into the streams, and what the next mix reads of them
    gated_mean      between and after the two products of gated streams
    sinkhorn_input  the block's input after the product of mixed streams, and how its result returns
    mix_streams     enter_streams and the product of mixed streams, for few rows: by many blocks
    mixed_input     the block's input from their sums

`runtime.models.streams` has the formulas, the headers of the texts the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32

N_STREAM = 4
"""The kernels' texts have registers for each."""

RETURN_NOTHING, RETURN_GATED, RETURN_MIXED, RETURN_TO_ALL = 0, 1, 2, 3
ENTER_NOTHING, ENTER_GATED, ENTER_MIXED, ENTER_MEAN = 0, 1, 2, 3

VALUES = 8
"""Of each stream, a thread."""

BLOCKS = (128, 512)
MAX_N = VALUES * BLOCKS[-1]
MEAN_BLOCK = 128

MIX_BLOCK, MIX_VALUES = 192, 128
"""Threads of a block of `mix_streams`, and its values of each stream."""

MIX_SHARED_BYTES = 4 * N_STREAM * MIX_VALUES * (1 + N_STREAM * (N_STREAM + 2))
"""Its dynamic shared memory: the values, and its part of the matrix."""

MIX_ROWS = 8
"""Rows that its blocks take beside each other; one block reads its part of the matrix once."""

INPUT_BLOCK = 64

N_MIX = N_STREAM * (N_STREAM + 2)
N_RETURNS = N_STREAM * (N_STREAM + 1)

N_SUMS, USED_SUMS = 36, 34
"""What a block of `mix_streams` writes: a sum for each row of the mix and each pair of streams."""

PAIRS = ((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""Of streams, in the order of their sums."""

FORMS = tuple((name, "u64") for name in ("out_f32", "q8_256", "q8_32"))
ENTER_PARAMS = (
    ("x", "u64"),
    ("n", "u32"),
    *((name, "u64") for name in ("count", "tokens", "delta", "expert_out", "slots", "weights")),
    ("n_used", "u32"),
    ("shared", "u64"),
    ("shared_weights", "u64"),
    ("returning", "u32"),
    ("returns", "u64"),
    ("returns_stride", "u32"),
    ("kind", "u32"),
    ("weight", "u64"),
    *FORMS,
    ("eps", "f32"),
)
MEAN_PARAMS = (
    *((name, "u64") for name in ("counts", "x", "gates")),
    *FORMS,
    *((name, "u32") for name in ("x_stride", "gates_stride", "n", "n_parts")),
    *((name, "f32") for name in ("scale", "gate_scale")),
)
SINKHORN_PARAMS = (
    ("x", "u64"),
    ("n", "u32"),
    *((name, "u64") for name in ("count", "mix", "base", "scales", "weight", "returns")),
    *FORMS,
    ("n_iterations", "u32"),
    ("epsilon", "f32"),
    ("eps", "f32"),
)
MIX_PARAMS = (
    ("x", "u64"),
    ("n", "u32"),
    *((name, "u64") for name in ("count", "delta", "expert_out", "slots", "weights")),
    ("n_used", "u32"),
    ("shared", "u64"),
    ("shared_weights", "u64"),
    ("returning", "u32"),
    *((name, "u64") for name in ("mix", "base", "scales", "matrix", "sums")),
    ("n_iterations", "u32"),
    ("epsilon", "f32"),
)
INPUT_PARAMS = (
    ("x", "u64"),
    ("n", "u32"),
    ("count", "u64"),
    ("sums", "u64"),
    ("n_sums", "u32"),
    *((name, "u64") for name in ("base", "scales", "weight", "mix")),
    *FORMS,
    ("epsilon", "f32"),
    ("eps", "f32"),
)


def block_of(n: int) -> int:
    """Threads for streams of n values.

    Raises:
        ValueError: n is not a multiple of 8, or above `MAX_N`.
    """
    if n % VALUES or not 0 < n <= MAX_N:
        raise ValueError(f"streams of {n} values: not a multiple of {VALUES} up to {MAX_N}")
    return next(block for block in BLOCKS if VALUES * block >= n)


def enter_streams(block: int, *, overlapped: bool = False) -> Kernel:
    """A block a row, of `block_of(n)` threads; grid (rows,)."""
    return Kernel(
        entry="enter_streams",
        source="enter_streams.ptx",
        defines=launch_defines(block, 1, overlapped),
        params=ENTER_PARAMS,
        block=block,
        reference=enter_reference,
    )


def gated_mean(*, overlapped: bool = False) -> Kernel:
    """Parts of rows times the sigmoid of others, summed; grid `gated_mean_grid`."""
    return Kernel(
        entry="gated_mean",
        source="gated_mean.ptx",
        defines=launch_defines(MEAN_BLOCK, 4, overlapped),
        params=MEAN_PARAMS,
        block=MEAN_BLOCK,
        reference=gated_mean_reference,
    )


def gated_mean_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-n // (VALUES * MEAN_BLOCK)), n_rows


def sinkhorn_input(block: int, *, overlapped: bool = False) -> Kernel:
    """Two blocks a row, of `block_of(n)` threads; grid (2, rows), or (1, rows) for what returns."""
    return Kernel(
        entry="sinkhorn_input",
        source="sinkhorn_input.ptx",
        defines=launch_defines(block, 1, overlapped),
        params=SINKHORN_PARAMS,
        block=block,
        reference=sinkhorn_reference,
    )


def mix_streams(*, overlapped: bool = False) -> Kernel:
    """What `enter_streams` does for mixed streams, and the mix's sums; grid `mix_grid`."""
    return Kernel(
        entry="mix_streams",
        source="mix_streams.ptx",
        defines=launch_defines(MIX_BLOCK, 2, overlapped),
        params=MIX_PARAMS,
        block=MIX_BLOCK,
        reference=mix_reference,
    )


def mix_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-n // MIX_VALUES), min(n_rows, MIX_ROWS)


def mixed_input(*, overlapped: bool = False) -> Kernel:
    """The input from the sums of `mix_streams`; grid `mixed_input_grid`."""
    return Kernel(
        entry="mixed_input",
        source="mixed_input.ptx",
        defines=launch_defines(INPUT_BLOCK, 4, overlapped),
        params=INPUT_PARAMS,
        block=INPUT_BLOCK,
        reference=sinkhorn_reference,
    )


def mixed_input_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-n // (VALUES * INPUT_BLOCK)), n_rows


def sigmoid(x: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """1 / (1 + e^-x) in f64."""
    result: NDArray[np.float64] = 1 / (1 + np.exp(-x.astype(np.float64)))
    return result


def enter_reference(
    r: F32, y: F32, returning: int, returns: F32, kind: int, weight: F32, eps: float
) -> tuple[F32, F32]:
    """(streams f32[rows, 4, n], what enters) after the result y f32[rows, n] returned, in f64.

    returns f32[rows, 4 or 20]; weight f32[4, n] or f32[n].
    """
    streams: NDArray[np.float64] = r.astype(np.float64)
    if returning == RETURN_GATED:
        streams = streams + 2 * sigmoid(returns[:, :4] / 4)[..., None] * y[:, None]
    elif returning == RETURN_MIXED:
        matrix = returns[:, 4:].reshape(-1, 4, 4)
        streams = np.einsum("rfo,rfn->ron", matrix, streams) + returns[:, :4, None] * y[:, None]
    elif returning == RETURN_TO_ALL:
        streams = np.broadcast_to(y[:, None], streams.shape).astype(np.float64)
    rows = len(streams)
    entering = streams.mean(axis=1) if kind == ENTER_MEAN else streams
    if kind == ENTER_MIXED:
        entering = entering.reshape(rows, -1)
    entering = entering / np.sqrt((entering**2).mean(axis=-1, keepdims=True) + eps)
    if kind in (ENTER_GATED, ENTER_MEAN):
        entering = entering * weight
    return streams.astype(np.float32), entering.reshape(rows, -1).astype(np.float32)


def mix_reference(r: F32, matrix: F32) -> NDArray[np.float64]:
    """Sums f64[rows, blocks, 34] of streams f32[rows, 4, n] and the mix f32[24, 4, n]."""
    rows, n = len(r), r.shape[-1]
    n_blocks = -(-n // MIX_VALUES)
    beyond = ((0, 0), (0, 0), (0, n_blocks * MIX_VALUES - n))
    streams, mix = (np.pad(part.astype(np.float64), beyond) for part in (r, matrix))
    streams = streams.reshape(rows, N_STREAM, n_blocks, MIX_VALUES)
    mix = mix.reshape(N_MIX, N_STREAM, n_blocks, MIX_VALUES)
    products = np.einsum("rsbi,msbi->rbm", streams, mix)
    pairs = [(streams[:, s] * streams[:, t]).sum(axis=-1) for s, t in PAIRS]
    return np.concatenate([products, np.stack(pairs, axis=-1)], axis=-1)


def gated_mean_reference(x: F32, gates: F32, scale: float, gate_scale: float) -> F32:
    """x, gates f32[rows, n_parts, n] -> f32[rows, n]."""
    result: F32 = (scale * (x * sigmoid(gates * np.float32(gate_scale))).sum(axis=1)).astype(
        np.float32
    )
    return result


def sinkhorn_reference(
    r: F32, mix: F32, base: F32, scales: F32, weight: F32, n_iterations: int, epsilon: float,
    eps: float,
) -> tuple[F32, F32]:  # fmt: skip
    """(input f32[rows, n], returns f32[rows, 20]) of streams f32[rows, 4, n] and mix f32[rows, 24].

    See `runtime.models.streams.SinkhornStreams`; in f64.
    """
    m = mix.astype(np.float64) * np.repeat(scales, (4, 4, 16)) + base
    pre, post = sigmoid(m[:, :4]) + epsilon, 2 * sigmoid(m[:, 4:8])
    c = m[:, 8:].reshape(-1, 4, 4)
    c = np.exp(c - c.max(axis=2, keepdims=True))
    c = c / c.sum(axis=2, keepdims=True) + epsilon
    c = c / (c.sum(axis=1, keepdims=True) + epsilon)
    for _ in range(n_iterations - 1):
        c = c / (c.sum(axis=2, keepdims=True) + epsilon)
        c = c / (c.sum(axis=1, keepdims=True) + epsilon)
    row = (pre[..., None] * r).sum(axis=1)
    row = row / np.sqrt((row * row).mean(axis=1, keepdims=True) + eps) * weight
    returns = np.concatenate([post, c.reshape(-1, 16)], axis=1)
    return row.astype(np.float32), returns.astype(np.float32)


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every block, alone and overlapped."""
    for overlapped in (False, True):
        suffix = ", overlapped" if overlapped else ""
        for block in BLOCKS:
            for make in (enter_streams, sinkhorn_input):
                kernel = make(block, overlapped=overlapped)
                yield f"{kernel.entry} ({block} threads{suffix})", kernel
        for of_one_block in (gated_mean, mix_streams, mixed_input):
            kernel = of_one_block(overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
