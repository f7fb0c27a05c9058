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
SELECT_BLOCKS = (128, 256, 512, 1024)
"""Threads of a choice."""
SELECT_SCORES = 16
"""Scores that a thread has in registers."""
SCORES_BLOCKS = 264
"""Blocks of threads that scores are spread over: an H200 runs as many at a time."""
SCORES_TOKENS = 4
"""Most tokens of a block of scores: they read the same keys where they follow each other."""
TILE_ROWS = 16
"""Rows of a tensor-core product."""
CHUNK_BYTES = 1056
"""Of 32 values of so many rows: two operands and what keeps them in different banks."""
HEAD_ROWS = 32
"""Heads that a warp multiplies at a time."""

KEYS_PARAMS = (
    *((name, "u64") for name in ("counts", "rows", "spans", "states", "page_tables", "pages")),
    *((name, "u64") for name in ("keys", "gates", "key_norm", "key_bias", "pool_bias", "turns")),
    *((name, "u32") for name in ("slot_bytes", "table_stride", "page_bytes", "keys_stride")),
    *((name, "u32") for name in ("gates_stride", "dim", "block", "n_rot")),
    *((name, "f32") for name in ("eps", "key_eps", "magnitude")),
    ("late", "u32"),
)
SCORES_PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "pages")),
    *((name, "u64") for name in ("queries", "weights", "scores")),
    *((name, "u32") for name in ("table_stride", "page_bytes", "queries_stride")),
    *((name, "u32") for name in ("weights_stride", "n_head", "dim", "block", "n_best")),
    ("max_blocks", "u32"),
    ("tokens", "u32"),
    ("scale", "f32"),
    ("late", "u32"),
)
SELECT_PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "scores")),
    *((name, "u64") for name in ("lists", "ends", "masks")),
    *((name, "u32") for name in ("table_stride", "max_blocks", "list_stride", "mask_stride")),
    *((name, "u32") for name in ("block", "n_best", "late")),
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
    """Scores of every complete block; grid `index_scores_grid`, dynamic shared memory
    `index_scores_shared_bytes`."""
    return Kernel(
        entry="index_scores",
        source="index_scores.ptx",
        defines=launch_defines(SCORES_BLOCK, 2, overlapped),
        params=SCORES_PARAMS,
        block=SCORES_BLOCK,
        reference=scores_reference,
    )


def index_scores_tokens(n_tokens: int, n_head: int, dim: int, shared_bytes: int) -> int:
    """Tokens of a block, where one may have so much shared memory.

    Raises: ValueError where the heads of one token have no room.
    """
    tokens = 1 << max(0, min(n_tokens, SCORES_TOKENS).bit_length() - 1)
    while index_scores_shared_bytes(n_head, dim, tokens) > shared_bytes:
        if tokens == 1:
            raise ValueError(f"no room for {n_head} heads that choose keys by {dim} values")
        tokens //= 2
    return tokens


def index_scores_shared_bytes(n_head: int, dim: int, tokens: int) -> int:
    """Queries of so many tokens in two parts, as operands of tensor-core products."""
    n_tiles = -(-n_head // HEAD_ROWS) * HEAD_ROWS // TILE_ROWS
    return 2 * tokens * n_tiles * -(-dim // WARP) * CHUNK_BYTES


def index_scores_grid(n_tokens: int, tokens: int) -> tuple[int, int]:
    """Slices of the keys, and blocks of `tokens` tokens."""
    n_groups = -(-n_tokens // tokens)
    return max(1, SCORES_BLOCKS // n_groups), n_groups


def index_select(block: int = SELECT_BLOCKS[-1], *, overlapped: bool = False) -> Kernel:
    """Where the keys lie that each token reads; grid (tokens,), block `index_select_block`."""
    return Kernel(
        entry="index_select",
        source="index_select.ptx",
        defines=launch_defines(block, SELECT_BLOCKS[-1] // block, overlapped),
        params=SELECT_PARAMS,
        block=block,
        reference=select_reference,
    )


def index_select_block(max_blocks: int) -> int:
    """Threads that have so many scores in registers, or the most there are."""
    enough = (block for block in SELECT_BLOCKS if SELECT_SCORES * block >= max_blocks)
    return next(enough, SELECT_BLOCKS[-1])


def list_keys(block: int, n_best: int) -> int:
    """Keys that a token may read: its best blocks, and one that is not complete."""
    return (n_best + 1) * block


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


def select_reference(scores: F32, position: int, block: int, n_best: int) -> NDArray[np.int64]:
    """The keys that the token reads, in order; scores that are not numbers are the lowest."""
    n_blocks = (position + 1) // block
    known = np.where(np.isnan(scores[:n_blocks]), -np.inf, scores[:n_blocks])
    best = np.sort(np.argsort(-known, kind="stable")[:n_best])
    keys = (best[:, None] * block + np.arange(block)).reshape(-1)
    return np.concatenate([keys, np.arange(n_blocks * block, position + 1)])


def variants() -> Iterator[tuple[str, Kernel]]:
    """All three, alone and overlapped; choices by every number of threads."""
    for overlapped in (False, True):
        early = ", overlapped" if overlapped else ""
        for make in (index_keys, index_scores):
            kernel = make(overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
        for block in SELECT_BLOCKS:
            kernel = index_select(block, overlapped=overlapped)
            yield f"{kernel.entry} ({block} threads{early})", kernel
