"""The GPU kernels that choose what sparse attention reads: block keys, scores, the best blocks.

`runtime.models.indexer` has the formulas, the headers of the texts the parameters.  Queries are
those of `ops.gpu.heads` where they are normed or rotated, else the product's rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import WARP, Kernel, launch_defines
from ops.quants.block import F32

PAGE_TOKENS = 32
MAX_DIM = 128
KEYS_BLOCK = 128
SCORES_BLOCK = 128
SELECT_BLOCK = 256
SLICES = 264
"""Blocks of a token's scores while few tokens are decoded: two a multiprocessor."""

KEYS_PARAMS = (
    *((name, "u64") for name in ("counts", "rows", "spans", "states", "page_tables", "pages")),
    *((name, "u64") for name in ("keys", "gates", "key_norm", "key_bias", "pool_bias", "turns")),
    *((name, "u32") for name in ("slot_bytes", "table_stride", "page_bytes", "keys_stride")),
    *((name, "u32") for name in ("gates_stride", "dim", "block", "n_rot")),
    *((name, "f32") for name in ("eps", "key_eps", "magnitude")),
)
SCORES_PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "pages")),
    *((name, "u64") for name in ("queries", "weights", "scores")),
    *((name, "u32") for name in ("table_stride", "page_bytes", "queries_stride")),
    *((name, "u32") for name in ("weights_stride", "n_head", "dim", "block", "n_best")),
    ("max_blocks", "u32"),
    ("scale", "f32"),
)
SELECT_PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "scores", "masks")),
    *((name, "u32") for name in ("max_blocks", "mask_stride", "block", "n_best")),
)


def index_keys(*, overlapped: bool = False) -> Kernel:
    """Keys of the blocks that a step completes; a warp a token, grid `index_keys_grid`."""
    return Kernel(
        entry="index_keys",
        source="index_keys.ptx",
        defines=launch_defines(KEYS_BLOCK, 4, overlapped),
        params=KEYS_PARAMS,
        block=KEYS_BLOCK,
        reference=block_key_reference,
    )


def index_keys_grid(n_tokens: int) -> tuple[int]:
    return (-(-n_tokens // (KEYS_BLOCK // WARP)),)


def index_scores(*, overlapped: bool = False) -> Kernel:
    """Scores of every complete block; grid (slices, tokens)."""
    return Kernel(
        entry="index_scores",
        source="index_scores.ptx",
        defines=launch_defines(SCORES_BLOCK, 4, overlapped),
        params=SCORES_PARAMS,
        block=SCORES_BLOCK,
        reference=scores_reference,
    )


def index_select(*, overlapped: bool = False) -> Kernel:
    """Bits of the keys that each token reads; grid (tokens,)."""
    return Kernel(
        entry="index_select",
        source="index_select.ptx",
        defines=launch_defines(SELECT_BLOCK, 4, overlapped),
        params=SELECT_PARAMS,
        block=SELECT_BLOCK,
        reference=select_reference,
    )


def token_key_reference(key: F32, norm: F32, bias: F32 | None, key_eps: float) -> F32:
    """Keys f32[n, dim] of tokens after their layer norm, where there is a bias."""
    if bias is None:
        return key
    wide = key.astype(np.float64)
    wide -= wide.mean(axis=-1, keepdims=True)
    wide /= np.sqrt((wide**2).mean(axis=-1, keepdims=True) + key_eps)
    result: F32 = (wide * norm + bias).astype(np.float32)
    return result


def block_key_reference(
    keys: F32, gates: F32 | None, norm: F32 | None, angles: NDArray[np.float64], eps: float
) -> F32:
    """The key f32[dim] of a block of tokens' keys f32[block, dim].

    gates f32[block, dim] with their biases, None: the mean; norm None: tokens' keys are normed;
    angles f64[n_rot / 2] at the block's first position.
    """
    wide = keys.astype(np.float64)
    share = np.ones(wide.shape) if gates is None else np.exp(gates - gates.max(axis=0))
    key = (share * wide).sum(axis=0) / share.sum(axis=0)
    if norm is not None:
        key = key / np.sqrt((key**2).mean() + eps) * norm
    half = len(angles)
    low, high = key[:half].copy(), key[half : 2 * half].copy()
    key[:half] = low * np.cos(angles) - high * np.sin(angles)
    key[half : 2 * half] = low * np.sin(angles) + high * np.cos(angles)
    result: F32 = key.astype(np.float32)
    return result


def scores_reference(queries: F32, keys: F32, weights: F32 | None, scale: float) -> F32:
    """Scores f32[n_blocks] of queries f32[n_head, dim] and keys f32[n_blocks, dim], in f64."""
    products = np.maximum(queries.astype(np.float64) @ keys.astype(np.float64).T, 0)
    if weights is not None:
        products = products * weights[:, None]
    result: F32 = (scale * products.sum(axis=0)).astype(np.float32)
    return result


def select_reference(scores: F32, position: int, block: int, n_best: int) -> NDArray[np.uint32]:
    """u32[pages up to the position's]: a bit for each key that the token reads."""
    n_blocks = (position + 1) // block
    best = np.argsort(-scores[:n_blocks], kind="stable")[:n_best]
    read = np.zeros((position // PAGE_TOKENS + 1) * PAGE_TOKENS, bool)
    for first in best * block:
        read[first : first + block] = True
    read[n_blocks * block : position + 1] = True
    bits = read.reshape(-1, PAGE_TOKENS).astype(np.uint64) << np.arange(
        PAGE_TOKENS, dtype=np.uint64
    )
    result: NDArray[np.uint32] = bits.sum(axis=1).astype(np.uint32)
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """All three, alone and overlapped."""
    for make in (index_keys, index_scores, index_select):
        for overlapped in (False, True):
            kernel = make(overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
