"""Latents of a cache of q8_0 as `latent_prompt` takes them: f16, and f16 of what that leaves.

A page's rows lie there as in the cache, those of what they leave behind them.  A code times its
scale has 18 bits: both parts together have it to 22, and results stay within the 1e-4 that they may
be off, which f16 alone would leave.  A value beyond 65504 becomes infinite, as in a cache of f16.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import PAGE_TOKENS, GPUPageLayout
from ops.gpu.latent_attention import DIMS_K
from ops.quants.block import F32

BLOCK = 256


def pair_page_bytes(dim_k: int) -> int:
    """Bytes of a page's pairs."""
    return 2 * 2 * PAGE_TOKENS * dim_k


def latent_pairs(dim_k: int, *, overlapped: bool = False) -> Kernel:
    """Pages of a step's sequences -> pairs, at the same pages; see the kernel's header.

    dim_k: one of `ops.gpu.latent_attention.DIMS_K`.  Grid: the pages of a sequence, sequences.
    """
    return Kernel(
        entry="latent_pairs",
        source="latent_pairs.ptx",
        defines={
            **launch_defines(BLOCK, 4, overlapped),
            "DIM_K": dim_k,
            "ROW_PARTS": dim_k // 8,
            "REST_AT": pair_page_bytes(dim_k) // 2,
            "SCALES_AT": GPUPageLayout("keys", "q8_0", dim_k).value_bytes,
        },
        params=(
            *((name, "u64") for name in ("counts", "page_tables", "k_pages", "pairs")),
            *((name, "u32") for name in ("table_stride", "k_page_bytes")),
        ),
        block=BLOCK,
        reference=latent_pairs_reference,
    )


def latent_pairs_reference(rows: F32) -> tuple[F32, F32]:
    """f16 values of rows, and of what they leave."""
    high = rows.astype(np.float16).astype(np.float32)
    return high, (rows - high).astype(np.float16).astype(np.float32)


def variants() -> Iterator[tuple[str, Kernel]]:
    """Both widths, alone and overlapped."""
    for dim_k in DIMS_K:
        for overlapped in (False, True):
            name = f"latent_pairs ({dim_k}{', overlapped' * overlapped})"
            yield name, latent_pairs(dim_k, overlapped=overlapped)
