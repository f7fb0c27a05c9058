"""The GPU kernel between the products of Q, K and V and attention: norms, rope, the KV store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import SCALE_DIMS
from ops.quants.block import F32

NORM_NONE, NORM_HEAD, NORM_ROW = 0, 1, 2
ROPE_NONE, ROPE_NEOX, ROPE_NORM = 0, 1, 2

BLOCK = 256
HEADS_PER_BLOCK = BLOCK // 32
MIN_BLOCKS = 6

PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "cell_pages", "qkv", "q")),
    *((name, "u64") for name in ("q_norm", "k_norm", "turns", "k_pages", "v_pages")),
    *((name, "u32") for name in ("row_values", "q_stride", "k_first", "v_first")),
    *((name, "u32") for name in ("n_head", "n_head_kv", "dim_k", "dim_v")),
    *((name, "u32") for name in ("norm_kind", "rope_kind", "n_rot")),
    *((name, "u32") for name in ("k_cache", "k_page_bytes", "k_head_bytes")),
    *((name, "u32") for name in ("v_cache", "v_page_bytes", "v_head_bytes")),
    *((name, "f32") for name in ("eps", "q_scale", "magnitude")),
)


def heads(*, overlapped: bool = False) -> Kernel:
    """Rows of Q, K and V -> scaled queries, and keys and values in their pages.

    One kernel serves every shape, norm, pairing and cache type; see its header for the parameters.
    Grid `heads_grid`, dynamic shared memory `heads_shared_bytes`.
    """
    return Kernel(
        entry="heads",
        source="heads.ptx",
        defines=launch_defines(BLOCK, MIN_BLOCKS, overlapped),
        params=PARAMS,
        block=BLOCK,
        reference=heads_reference,
    )


def heads_grid(n_head: int, n_head_kv: int, n_tokens: int) -> tuple[int, int]:
    """A warp a head of q, k and v."""
    return -(-(n_head + 2 * n_head_kv) // HEADS_PER_BLOCK), n_tokens


def heads_shared_bytes(dim_k: int, dim_v: int) -> int:
    """A head f32 and its weights a warp, a cosine and a sine for each pair of dimensions."""
    padded = -(-max(dim_k, dim_v) // SCALE_DIMS) * SCALE_DIMS
    return HEADS_PER_BLOCK * 2 * 4 * padded + 4 * dim_k


def turns_of(frequencies: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Radians per position f64[n_rot / 2] -> 2^-64 turns per position u64[n_rot / 2].

    A position times that, modulo 2^64, is the angle of any position without loss: whole turns fall
    off at the top.
    """
    turns = np.mod(frequencies / (2.0 * np.pi), 1.0)
    high = np.floor(turns * 2.0**32)
    low = np.floor((turns * 2.0**32 - high) * 2.0**32)
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def heads_reference(
    x: F32,
    weight: F32 | None,
    angles: NDArray[np.float64],
    neox: bool,
    magnitude: float,
    eps: float,
) -> F32:
    """Heads f32[n_heads, dim] of one token after norm (None: none) and rope.

    angles: f64[n_rot / 2] of the token's position; weight f32[n_heads or 1, dim] with one norm a
    head, or f32[n_heads * dim] with one norm over all heads.
    """
    y: NDArray[Any] = x.astype(np.float64)
    if weight is not None:
        norm_axis = None if weight.ndim == 1 else -1
        mean = np.mean(y * y, axis=norm_axis, keepdims=True)
        y = y / np.sqrt(mean + eps) * (weight.reshape(y.shape) if weight.ndim == 1 else weight)
    half = len(angles)
    first = np.arange(half) if neox else 2 * np.arange(half)
    second = first + half if neox else first + 1
    cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
    a, b = y[:, first].copy(), y[:, second].copy()
    y[:, first], y[:, second] = a * cos - b * sin, a * sin + b * cos
    result: F32 = y.astype(np.float32)
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """Alone and overlapped."""
    yield "heads", heads()
    yield "heads (overlapped)", heads(overlapped=True)
