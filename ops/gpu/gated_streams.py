"""The GPU kernels that enter gated streams where rows are few: many blocks share a row.

    gate_streams  the last block's result into the streams, and sums over parts of them
    gated_rows    the normed streams in a row, from those sums; how the next result returns
    gated_sum     the mean of the normed streams, each value gated: `gated_mean`, a warp a stream

The first two do together what `enter_streams` does with a block a row, and the product `inject` of
`runtime.models.streams.GatedStreams`, whose few rows would leave most of a GPU idle.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.streams import FORMS, N_STREAM, gated_mean_reference
from ops.quants.block import F32

BLOCK = 128
VALUES = 8
"""Of a row, a thread of `gated_rows`."""

N_SUMS = N_STREAM * (1 + N_STREAM)
"""Of a block of `gate_streams`: of a stream its squares, and a sum for each row of `inject`."""

MAX_BLOCKS = 32
"""Whose sums `gated_rows` adds."""

MAX_N = BLOCK * MAX_BLOCKS

GATE_PARAMS = (
    ("x", "u64"),
    ("n", "u32"),
    *((name, "u64") for name in ("count", "tokens", "delta", "expert_out", "slots", "weights")),
    ("n_used", "u32"),
    *((name, "u64") for name in ("shared", "shared_weights")),
    ("returning", "u32"),
    *((name, "u64") for name in ("returns", "inject", "weight", "sums")),
)
ROWS_PARAMS = (
    *((name, "u64") for name in ("counts", "x", "tokens")),
    ("n", "u32"),
    ("sums", "u64"),
    ("n_sums", "u32"),
    *((name, "u64") for name in ("weight", "returns")),
    *FORMS,
    ("record_factor", "f32"),
    ("eps", "f32"),
)

SUM_PARAMS = (
    *((name, "u64") for name in ("counts", "x", "gates")),
    *FORMS,
    *((name, "u32") for name in ("x_stride", "gates_stride", "n")),
    ("scale", "f32"),
)


def gate_streams(*, overlapped: bool = False) -> Kernel:
    """A thread has a value of every stream; grid `gate_grid`."""
    return Kernel(
        entry="gate_streams",
        source="gate_streams.ptx",
        defines=launch_defines(BLOCK, 4, overlapped),
        params=GATE_PARAMS,
        block=BLOCK,
        reference=gate_reference,
    )


def gate_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-n // BLOCK), n_rows


def gated_rows(*, overlapped: bool = False) -> Kernel:
    """A thread has eight values of a row; grid `rows_grid`."""
    return Kernel(
        entry="gated_rows",
        source="gated_rows.ptx",
        defines=launch_defines(BLOCK, 4, overlapped),
        params=ROWS_PARAMS,
        block=BLOCK,
        reference=rows_reference,
    )


def rows_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-N_STREAM * n // (VALUES * BLOCK)), n_rows


def gated_sum(*, overlapped: bool = False) -> Kernel:
    """A thread has eight values of a stream; grid `sum_grid`."""
    return Kernel(
        entry="gated_sum",
        source="gated_sum.ptx",
        defines=launch_defines(BLOCK, 4, overlapped),
        params=SUM_PARAMS,
        block=BLOCK,
        reference=gated_mean_reference,
    )


def sum_grid(n: int, n_rows: int) -> tuple[int, int]:
    return -(-N_STREAM * n // (VALUES * BLOCK)), n_rows


def gate_reference(r: F32, inject: F32, weight: F32) -> NDArray[np.float64]:
    """Sums f64[rows, blocks, 20] of streams f32[rows, 4, n]; inject f32[4, 4, n]."""
    n = r.shape[-1]
    n_blocks = -(-n // BLOCK)
    beyond = ((0, 0), (0, 0), (0, n_blocks * BLOCK - n))
    streams, factors = (np.pad(part.astype(np.float64), beyond) for part in (r, inject * weight))
    streams = streams.reshape(len(r), N_STREAM, n_blocks, BLOCK)
    factors = factors.reshape(len(inject), N_STREAM, n_blocks, BLOCK)
    squares = (streams**2).sum(axis=-1).transpose(0, 2, 1)
    products = np.einsum("rsbi,jsbi->rbjs", streams, factors)
    return np.concatenate([squares, products.reshape(len(r), n_blocks, -1)], axis=-1)


def rows_reference(
    r: F32, sums: NDArray[np.float64], weight: F32, eps: float
) -> tuple[F32, NDArray[np.float64]]:
    """(normed streams f32[rows, 4 n], what returns f64[rows, 4]) of streams and blocks' sums."""
    n, total = r.shape[-1], sums.sum(axis=1)
    scale = 1 / np.sqrt(total[:, :N_STREAM] / n + eps)
    normed = r.astype(np.float64) * scale[..., None] * weight
    products = total[:, N_STREAM:].reshape(len(r), N_STREAM, N_STREAM)
    return normed.reshape(len(r), -1).astype(np.float32), np.einsum("rjs,rs->rj", products, scale)


def variants() -> Iterator[tuple[str, Kernel]]:
    """All three, alone and overlapped."""
    for make in (gate_streams, gated_rows, gated_sum):
        for overlapped in (False, True):
            kernel = make(overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
