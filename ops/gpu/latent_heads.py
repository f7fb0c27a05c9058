"""The GPU kernel between the products of a latent attention and its keys: norm, rope, KV store.

Latent attention is `ops.gpu.attention` with one kv head: keys of dim_latent + dim_rope values,
values of dim_latent, the normed latent: the first part of a key, which pages of other types than
f16 keep once more, transposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.gpu.heads import BLOCK, HEADS_PER_BLOCK, MIN_BLOCKS, heads_reference
from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import SCALE_DIMS

PARAMS = (
    *((name, "u64") for name in ("counts", "positions", "cell_pages", "q", "latents", "norm")),
    *((name, "u64") for name in ("turns", "plain", "queries", "k_pages", "v_pages")),
    *((name, "u32") for name in ("q_row", "latent_row", "n_head")),
    *((name, "u32") for name in ("dim_nope", "dim_rope", "dim_latent", "rope_kind", "n_rot")),
    *((name, "u32") for name in ("k_cache", "k_page_bytes", "v_cache", "v_page_bytes")),
    *((name, "f32") for name in ("eps", "q_scale", "magnitude")),
)


def latent_heads(*, overlapped: bool = False) -> Kernel:
    """Rows of queries and latents -> parts of queries, and a key and a value in their page.

    One kernel serves every shape; see its header for the parameters. Grid `latent_heads_grid`,
    dynamic shared memory `latent_heads_shared_bytes`.
    """
    return Kernel(
        entry="latent_heads",
        source="latent_heads.ptx",
        defines=launch_defines(BLOCK, MIN_BLOCKS, overlapped),
        params=PARAMS,
        block=BLOCK,
        reference=heads_reference,
    )


def latent_heads_grid(n_head: int, n_tokens: int) -> tuple[int, int]:
    """A warp a head, and one for the latent."""
    return -(-(n_head + 1) // HEADS_PER_BLOCK), n_tokens


def latent_heads_shared_bytes(dim_nope: int, dim_rope: int, dim_latent: int) -> int:
    """A row f32 a warp."""
    n_values = max(dim_nope, dim_latent) + dim_rope
    return HEADS_PER_BLOCK * 4 * (-(-n_values // SCALE_DIMS) * SCALE_DIMS)


def variants() -> Iterator[tuple[str, Kernel]]:
    """Alone and overlapped."""
    yield "latent_heads", latent_heads()
    yield "latent_heads (overlapped)", latent_heads(overlapped=True)
