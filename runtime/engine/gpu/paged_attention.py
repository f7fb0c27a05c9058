"""PagedAttention: softmax attention over the pages of a layer as launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ops.arithmetic import activation_layout
from ops.gpu.attention import (
    PROMPT_ROWS,
    attention,
    attention_grid,
    attention_join,
    attention_join_grid,
    attention_prompt,
    attention_prompt_grid,
    attention_prompt_shared_bytes,
    attention_shared_bytes,
    n_splits,
    partials_bytes,
)
from ops.gpu.attention_shape import AttentionShape
from ops.gpu.latent_attention import (
    DIM_V,
    DIMS_K,
    JOINED_VALUES,
    MAX_JOINED,
    ROWS,
    LatentDecodeShape,
    LatentPromptShape,
    latent_decode,
    latent_decode_grid,
    latent_join,
    latent_join_grid,
    latent_prompt,
    latent_prompt_grid,
)
from ops.gpu.latent_pairs import latent_pairs, pair_page_bytes
from ops.quants.block import ActivationKind
from runtime.engine.gpu.kv import LayerCache
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.row_launches import add_records

PROMPT_BLOCKS = 4
"""Blocks that a token of a prompt gets, at least."""


@dataclass(frozen=True)
class KeyChoice:
    """What tokens read, see `ops.gpu.indexer.index_select`: addresses, and values from one token's
    to the next.

    n_keys  the most that one reads
    """

    lists: int
    list_stride: int
    ends: int
    masks: int
    mask_stride: int
    n_keys: int


@dataclass(frozen=True)
class PagedAttention:
    """out[t] = attention of token t over the cached keys and values of its sequence.

    name    of the layer's launches, as in `3.attention`
    q       address of f32[n_tokens, n_head, dim_k], scaled
    out     rows of n_head * dim_v values
    window  a key is seen while position - key < window; 0: every earlier key
    sinks, gates   addresses, 0: none; see `ops.gpu.attention`
    choice  which keys each token reads; None: every earlier key
    """

    name: str
    cache: LayerCache
    n_head: int
    q: int
    out: DeviceRows
    window: int = 0
    sinks: int = 0
    gates: int = 0
    gate_row: int = 0
    gate_stride: int = 0
    value_scale: float = 1.0
    choice: KeyChoice | None = None

    @property
    def group(self) -> int:
        """Heads that share a kv head."""
        return self.n_head // self.cache.n_head_kv


def attends_prompts(parts: PlanParts, cache: LayerCache, n_head: int) -> bool:
    """Whether a multiprocessor has room for a block of `add_prompt_attention`."""
    if n_head // cache.n_head_kv > PROMPT_ROWS:
        return False
    shape = attention_shape(parts, cache)
    return attention_prompt_shared_bytes(shape) <= parts.gpu.block_shared_bytes


def prompt_splits(n_head: int, n_head_kv: int) -> int:
    """Splits of a token of a prompt where it gets blocks of its own: there are other tokens, and
    the partial results of all of them are kept."""
    return max(1, PROMPT_BLOCKS // attention_grid(1, n_head, n_head_kv, 1)[1])


def add_attention(parts: PlanParts, a: PagedAttention, max_splits: int) -> None:
    """A block for each split of a token's keys; then the splits are put together.

    max_splits: the same for every launch whose tokens shall have the same bits.
    """
    choice, dim_v = a.choice, a.cache.values.dim
    n_keys = parts.shape.n_context if choice is None else choice.n_keys
    positions = parts.control("positions") if choice is None else choice.ends
    splits = n_splits(n_keys - 1, max_splits, a.window)
    sizes = partials_bytes(splits, a.n_head, dim_v, parts.n_tokens)
    partials = parts.room.place(f"attention partials {sizes[0]}", sizes[0])
    states = parts.room.place(f"attention states {sizes[1]}", sizes[1])
    between = {"partials": partials, "states": states, "max_splits": max_splits}
    _add_splits(parts, a, splits, {**_reading(parts, a), "positions": positions, **between})
    given = {
        **between,
        "counts": parts.token_count,
        "positions": positions,
        "out": a.out.wanted("f32"),
        "n_head": a.n_head,
        "dim_v": dim_v,
        "n_splits": splits,
    }
    if _wants_rows_alone(a) and max_splits <= MAX_JOINED:
        parts.plan.add(
            f"{a.name}_join",
            latent_join(overlapped=parts.overlapped),
            latent_join_grid(a.n_head, dim_v, parts.n_tokens),
            given,
            overlapped=parts.overlapped,
        )
        return
    parts.plan.add(
        f"{a.name}_join",
        attention_join(overlapped=parts.overlapped),
        attention_join_grid(a.n_head, dim_v, parts.n_tokens),
        {
            **given,
            **_ending(a),
            "window": a.window,
            **_records(a.out, "q8_256", "256"),
            **_records(a.out, "q8_32", "32"),
        },
        overlapped=parts.overlapped,
    )


def _wants_rows_alone(a: PagedAttention) -> bool:
    """Whether `latent_join` puts the splits together, which knows of nothing else."""
    has_ending = a.window or a.sinks or a.gates or a.value_scale != 1
    has_records = a.out.wanted("q8_256") or a.out.wanted("q8_32")
    return not has_ending and not has_records and a.cache.values.dim % JOINED_VALUES == 0


def _add_splits(parts: PlanParts, a: PagedAttention, splits: int, given: dict[str, int]) -> None:
    """The launch that computes the splits; given: arguments, those of `attention` without lists."""
    choice = a.choice
    if choice is not None:
        given = {**given, "lists": choice.lists, "list_stride": choice.list_stride}
    if latent := _latent_decode_shape(parts, a):
        unknown = ("v_pages", "v_page_bytes", "group", "window")
        parts.plan.add(
            a.name,
            latent_decode(latent),
            latent_decode_grid(splits, a.n_head, parts.n_tokens),
            {name: value for name, value in given.items() if name not in unknown},
            shared_bytes=latent.shared_bytes,
            overlapped=parts.overlapped,
        )
        return
    shape = replace(attention_shape(parts, a.cache), chooses=choice is not None)
    parts.plan.add(
        a.name,
        attention(shape),
        attention_grid(splits, a.n_head, a.cache.n_head_kv, parts.n_tokens),
        given,
        shared_bytes=attention_shared_bytes(shape),
        overlapped=parts.overlapped,
    )


def add_prompt_attention(parts: PlanParts, a: PagedAttention) -> None:
    """The same for tokens that follow each other; then the records of it."""
    shape, result = attention_shape(parts, a.cache), a.out.want("f32")
    parts.plan.add(
        f"{a.name}_prompt",
        attention_prompt(shape),
        attention_prompt_grid(a.n_head, a.cache.n_head_kv, parts.n_tokens),
        {**_reading(parts, a), **_ending(a), "out": result},
        shared_bytes=attention_prompt_shared_bytes(shape),
        overlapped=parts.overlapped,
    )
    add_records(parts, f"{a.name}_records", result, a.out)


def _latent_decode_shape(parts: PlanParts, a: PagedAttention) -> LatentDecodeShape | None:
    """What `latent_decode` is made for where it computes the splits; None: `attention` does."""
    if not _keeps_rows(a.cache):
        return None
    for buffers in (2, 1):
        shape = LatentDecodeShape(a.cache.keys.dim, buffers, parts.overlapped, a.choice is not None)
        if shape.shared_bytes <= parts.gpu.block_shared_bytes:
            return shape
    return None


def latent_prompt_shape(parts: PlanParts, a: PagedAttention) -> LatentPromptShape | None:
    """What `add_latent_prompt` is made for; None: `add_attention` has to do.

    A multiprocessor needs room for a unit of rows and for as many queries as pay.
    """
    pairs = _becomes_pairs(a.cache)
    if not pairs and not _keeps_rows(a.cache):
        return None
    for rows in ROWS:
        has_choice, alone = a.choice is not None, rows // min(a.n_head, rows) == 1
        listed = has_choice and alone and rows == ROWS[0]
        chooses = has_choice and not listed
        shape = LatentPromptShape(
            a.cache.keys.dim, rows, parts.overlapped, chooses, listed, pairs=pairs
        )
        if shape.shared_bytes <= parts.gpu.block_shared_bytes:
            return shape
    return None


def _keeps_rows(cache: LayerCache) -> bool:
    """Whether the cache has rows as `ops.gpu.latent_attention` takes them."""
    return not cache.v_pages and _has_latents(cache)


def _becomes_pairs(cache: LayerCache) -> bool:
    """Whether its keys begin with its values, and `ops.gpu.latent_pairs` takes them."""
    return cache.keys.cache_type == cache.values.cache_type == "q8_0" and _has_latents(cache)


def _has_latents(cache: LayerCache) -> bool:
    return cache.keys.dim in DIMS_K and cache.values.dim == DIM_V


def add_latent_prompt(
    parts: PlanParts, a: PagedAttention, shape: LatentPromptShape, pairs: int
) -> None:
    """Prompts whose rows of the cache are keys and values at once: f32 rows of `a.out`.

    pairs: where `add_latent_pairs` has put those of all pages; of shapes that take them.
    """
    names = ("counts", "positions", "rows", "page_tables", "q", "k_pages")
    numbers = ("n_head", "table_stride", "k_page_bytes")
    reading = _reading(parts, a)
    if shape.pairs:
        reading |= {"k_pages": pairs, "k_page_bytes": pair_page_bytes(shape.dim_k)}
    parts.plan.add(
        f"{a.name}_prompt",
        latent_prompt(shape),
        latent_prompt_grid(shape.rows, a.n_head, parts.n_tokens),
        {
            **{n: reading[n] for n in (*names, *numbers)},
            **(_lists(a) if shape.listed else _masks(a)),
            "out": a.out.want("f32"),
        },
        shared_bytes=shape.shared_bytes,
        overlapped=parts.overlapped,
    )


def add_latent_pairs(parts: PlanParts, a: PagedAttention, pairs: int) -> None:
    """The pairs of all pages that the step's tokens see, at the same pages of `pairs`."""
    keys = a.cache.keys
    parts.plan.add(
        f"{a.name}_pairs",
        latent_pairs(keys.dim, overlapped=parts.overlapped),
        (parts.layout.max_pages, parts.shape.n_sequences),
        {
            "counts": parts.token_count,
            "page_tables": parts.control("page_tables"),
            "k_pages": a.cache.k_pages,
            "pairs": pairs,
            "table_stride": parts.layout.max_pages,
            "k_page_bytes": a.cache.k_page_bytes,
        },
        overlapped=parts.overlapped,
    )


def attention_shape(parts: PlanParts, cache: LayerCache) -> AttentionShape:
    """What the kernels are made for."""
    keys, values = cache.keys, cache.values
    shape = AttentionShape(
        keys.dim, values.dim, keys.cache_type, values.cache_type, overlapped=parts.overlapped
    )
    if cache.v_pages:
        return shape
    two = replace(shape, row_buffers=2)
    fits = attention_shared_bytes(two) <= parts.gpu.block_shared_bytes
    return two if fits else replace(shape, row_buffers=1)


def _reading(parts: PlanParts, a: PagedAttention) -> dict[str, int]:
    """The arguments that say which tokens read which keys and values."""
    return {
        "counts": parts.token_count,
        "positions": parts.control("positions"),
        "rows": parts.control("rows"),
        "page_tables": parts.control("page_tables"),
        "q": a.q,
        "k_pages": a.cache.k_pages,
        "v_pages": a.cache.v_pages,
        "n_head": a.n_head,
        "group": a.group,
        "table_stride": parts.layout.max_pages,
        "k_page_bytes": a.cache.k_page_bytes,
        "v_page_bytes": a.cache.v_page_bytes,
        "window": a.window,
    }


def _lists(a: PagedAttention) -> dict[str, int]:
    """The arguments that say where the keys lie that a token reads, and how many there are."""
    if a.choice is None:
        return {}
    lists = {"lists": a.choice.lists, "list_stride": a.choice.list_stride}
    return {**lists, "positions": a.choice.ends}


def _masks(a: PagedAttention) -> dict[str, int]:
    """The arguments that say which keys a token reads, where it has a choice."""
    choice = a.choice
    return {} if choice is None else {"masks": choice.masks, "mask_stride": choice.mask_stride}


def _ending(a: PagedAttention) -> dict[str, float]:
    """The arguments that say what becomes of the weighted values."""
    return {
        "sinks": a.sinks,
        "gates": a.gates,
        "gate_row": a.gate_row,
        "gate_stride": a.gate_stride,
        "value_scale": a.value_scale,
    }


def _records(rows: DeviceRows, kind: ActivationKind, suffix: str) -> dict[str, int]:
    """The arguments of `attention_join` for the records of a kind; zeros where nobody wants it."""
    address = rows.wanted(kind)
    scales, sums, n_bytes = activation_layout(kind, rows.width) if address else (0, 0, 0)
    return {
        f"records_{suffix}": address,
        f"scales_{suffix}": scales,
        f"sums_{suffix}": sums,
        f"bytes_{suffix}": n_bytes,
    }
