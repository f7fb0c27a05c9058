"""What sparse attention reads, as launches: keys of blocks, scores, a token's best blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ops.gpu.attention_copies import LIST_KEYS
from ops.gpu.heads import NORM_HEAD, NORM_NONE, heads, heads_grid, heads_shared_bytes
from ops.gpu.indexer import (
    MAX_DIM,
    index_keys,
    index_keys_grid,
    index_scores,
    index_scores_grid,
    index_scores_shared_bytes,
    index_scores_tokens,
    index_select,
    index_select_block,
    list_keys,
)
from runtime.engine.gpu.kv import LayerCache
from runtime.engine.gpu.matrix_launches import Product
from runtime.engine.gpu.paged_attention import KeyChoice
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.gpu.rope_fields import rope_fields
from runtime.engine.step import StepKind
from runtime.models.indexer import IndexerSpec
from runtime.models.linear import Linear
from runtime.models.rope import RopePairing

FLOATS = 4
"""Parts of a row begin at multiples of so many values: 16-byte loads."""

Place = tuple[int, int]
"""The address of f32 rows, and the values from one to the next."""

NOTHING_KEPT = {
    "k_pages": 0, "v_pages": 0, "k_cache": 0, "k_page_bytes": 0, "k_head_bytes": 0, "v_cache": 0,
    "v_page_bytes": 0, "v_head_bytes": 0, "k_first": 0, "v_first": 0, "n_head_kv": 0, "k_norm": 0,
}  # fmt: skip
"""The arguments of `ops.gpu.heads` for queries alone."""


class IndexerLaunches:
    """Adds what comes before the attention of layers with an indexer.

    choice  the last one; None: every earlier key is read
    """

    def __init__(self, parts: PlanParts) -> None:
        self._parts = parts
        self.choice: KeyChoice | None = None

    def add(
        self, layer: int, indexer: IndexerSpec, cache: LayerCache, places: Mapping[str, Place]
    ) -> None:
        """Keep the keys of blocks; choose, where a token may have a choice.

        places  of the products of `inputs`, and where it `chooses` of the query too
        """
        self.keep(layer, indexer, cache, places)
        if not self.chooses(indexer):
            return
        self.score(layer, indexer, cache, places)
        self.choose(layer, indexer)

    def chooses(self, indexer: IndexerSpec) -> bool:
        """Whether a token of the step may have more keys than it reads."""
        return self._parts.shape.n_context // indexer.block > indexer.n_best

    def keep(
        self,
        layer: int,
        indexer: IndexerSpec,
        cache: LayerCache,
        places: Mapping[str, Place],
        *,
        late: bool = False,
    ) -> None:
        """Keep the keys of blocks.

        late: here and below, the last launch makes nothing that is read, so that this one may run
        beside it.
        """
        self.choice = None
        parts, vector, states = self._parts, self._parts.weights.vector, self._parts.held_states
        key, gate = places["key"], places.get("gate", (0, 0))
        turning = rope_fields(parts, indexer.rope)
        parts.plan.add(
            f"{layer}.index_keys",
            index_keys(overlapped=parts.overlapped),
            index_keys_grid(parts.n_tokens),
            {
                "counts": parts.token_count,
                "rows": parts.control("rows"),
                "spans": parts.control("spans"),
                "states": states.address(layer),
                "slot_bytes": states.slot_bytes,
                **self._pages(cache),
                "keys": key[0],
                "keys_stride": key[1],
                "gates": gate[0],
                "gates_stride": gate[1],
                "key_norm": vector(indexer.key_norm),
                "key_bias": vector(indexer.key_bias),
                "pool_bias": vector(indexer.pool_bias),
                "dim": indexer.head_dim,
                "block": indexer.block,
                "turns": turning["turns"],
                "n_rot": turning["n_rot"],
                "magnitude": turning["magnitude"],
                "eps": parts.model.spec.eps,
                "key_eps": indexer.key_eps,
                "late": late,
            },
            overlapped=parts.overlapped,
        )

    def _heads(self, layer: int, indexer: IndexerSpec, rows: int, stride: int) -> tuple[int, int]:
        """The queries after norm and rope, and the values from one token's to the next."""
        parts, dim, width = self._parts, indexer.head_dim, indexer.n_head * indexer.head_dim
        queries = parts.room.place(f"turned index queries {width}", 4 * parts.n_tokens * width)
        parts.plan.add(
            f"{layer}.index_heads",
            heads(overlapped=parts.overlapped),
            heads_grid(indexer.n_head, 0, parts.n_tokens),
            {
                **NOTHING_KEPT,
                "counts": parts.token_count,
                "positions": parts.control("positions"),
                "cell_pages": parts.control("cell_pages"),
                "qkv": rows,
                "q": queries,
                "q_norm": parts.weights.vector(indexer.query_norm),
                "row_values": stride,
                "q_stride": dim,
                "n_head": indexer.n_head,
                "dim_k": dim,
                "dim_v": dim,
                "norm_kind": NORM_NONE if indexer.query_norm is None else NORM_HEAD,
                "eps": parts.model.spec.eps,
                "q_scale": 1.0,
                **rope_fields(parts, indexer.rope),
            },
            shared_bytes=heads_shared_bytes(dim, dim),
            overlapped=parts.overlapped,
        )
        return queries, width

    def score(
        self,
        layer: int,
        indexer: IndexerSpec,
        cache: LayerCache,
        places: Mapping[str, Place],
        *,
        late: bool = False,
    ) -> None:
        """Score the keys of blocks by the queries."""
        parts, n, query = self._parts, self._parts.n_tokens, places["query"]
        if indexer.query_norm is not None or indexer.rope is not None:
            query, late = self._heads(layer, indexer, *query), False
        n_head, dim = indexer.n_head, indexer.head_dim
        tokens = index_scores_tokens(n, n_head, dim, parts.gpu.block_shared_bytes)
        weight = places.get("weight", (0, 0))
        parts.plan.add(
            f"{layer}.index_scores",
            index_scores(overlapped=parts.overlapped),
            index_scores_grid(n, tokens),
            {
                **self._sizes(indexer),
                "rows": parts.control("rows"),
                **self._pages(cache),
                "queries": query[0],
                "queries_stride": query[1],
                "weights": weight[0],
                "weights_stride": weight[1],
                "n_head": n_head,
                "dim": dim,
                "tokens": tokens,
                "scale": indexer.scale,
                "late": late,
            },
            shared_bytes=index_scores_shared_bytes(n_head, dim, tokens),
            overlapped=parts.overlapped,
        )

    def choose(self, layer: int, indexer: IndexerSpec, *, late: bool = False) -> None:
        """Choose by the scores."""
        parts, n = self._parts, self._parts.n_tokens
        sizes = self._sizes(indexer)
        choice = self.choice = self._room(indexer)
        parts.plan.add(
            f"{layer}.index_select",
            index_select(index_select_block(sizes["max_blocks"]), overlapped=parts.overlapped),
            (n,),
            {
                **sizes,
                "rows": parts.control("rows"),
                "page_tables": parts.control("page_tables"),
                "table_stride": parts.layout.max_pages,
                "lists": choice.lists,
                "list_stride": choice.list_stride,
                "ends": choice.ends,
                "masks": choice.masks,
                "mask_stride": choice.mask_stride,
                "late": late,
            },
            overlapped=parts.overlapped,
        )

    def _sizes(self, indexer: IndexerSpec) -> dict[str, int]:
        """What scores and choice have in common: where the scores lie, of how many blocks."""
        parts = self._parts
        max_blocks = -(-parts.shape.n_context // (indexer.block * FLOATS)) * FLOATS
        n_bytes = 4 * parts.n_tokens * max_blocks
        return {
            "counts": parts.token_count,
            "positions": parts.control("positions"),
            "scores": parts.room.place(f"index scores {max_blocks}", n_bytes),
            "block": indexer.block,
            "n_best": indexer.n_best,
            "max_blocks": max_blocks,
        }

    def _room(self, indexer: IndexerSpec) -> KeyChoice:
        """Where choices go; masks are for prompts."""
        room, n, pages = self._parts.room, self._parts.n_tokens, self._parts.layout.max_pages
        n_keys = list_keys(indexer.block, indexer.n_best)
        stride = n_keys // LIST_KEYS
        wants_masks = self._parts.shape.kind is StepKind.PREFILL
        # A unit of keys is two pages: one word further may be read, and what it says is not used.
        masks = room.place(f"key masks {pages}", 4 * (n * pages + 1)) if wants_masks else 0
        return KeyChoice(
            lists=room.place(f"key lists {stride}", 4 * n * stride),
            list_stride=stride,
            ends=room.place("key list ends", 4 * n),
            masks=masks,
            mask_stride=pages,
            n_keys=n_keys,
        )

    def _pages(self, cache: LayerCache) -> dict[str, int]:
        parts = self._parts
        return {
            "page_tables": parts.control("page_tables"),
            "table_stride": parts.layout.max_pages,
            "pages": cache.index_pages,
            "page_bytes": cache.index_page_bytes,
        }


def index_products(
    indexer: IndexerSpec, first: int, *, is_narrow: bool
) -> tuple[list[Product], dict[str, int], int]:
    """The products of `inputs` behind the first values of a row: with where each lies in it, and
    the values of the whole row."""
    products, starts = [], {}
    at = -(-first // FLOATS) * FLOATS
    for name, linear in inputs(indexer, is_narrow=is_narrow).items():
        products.append(Product(linear, at))
        starts[name] = at
        at += -(-linear.n_out // FLOATS) * FLOATS
    return products, starts, at


def inputs(indexer: IndexerSpec, *, is_narrow: bool) -> dict[str, Linear]:
    """The matrices that multiply the layer's input, by what they give."""
    named = {
        "query": None if is_narrow else indexer.query,
        "key": indexer.key,
        "gate": indexer.pool_gate,
        "weight": indexer.weight,
    }
    return {name: linear for name, linear in named.items() if linear is not None}


def indexer_obstacles(indexer: IndexerSpec) -> Iterator[str]:
    """Why the kernels cannot choose so."""
    rope, dim = indexer.rope, indexer.head_dim
    if indexer.block % LIST_KEYS:
        yield f"a choice among blocks of {indexer.block} tokens"
    if dim % 16 or dim > MAX_DIM:
        yield f"a choice of keys by {dim} values"
    if rope is not None and (rope.pairing is not RopePairing.NEOX or rope.n_rot % 8):
        yield f"a choice of keys with {rope.n_rot} values turned as {rope.pairing.name}"
