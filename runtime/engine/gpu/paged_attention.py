"""PagedAttention: softmax attention over the pages of a layer as launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ops.arithmetic import activation_layout
from ops.gpu.attention import (
    PROMPT_ROWS,
    AttentionShape,
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
from ops.quants.block import ActivationKind
from runtime.engine.gpu.kv import LayerCache
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts
from runtime.engine.gpu.row_launches import add_records

PROMPT_BLOCKS = 4
"""Blocks that a token of a prompt gets, at least."""


@dataclass(frozen=True)
class PagedAttention:
    """out[t] = attention of token t over the cached keys and values of its sequence.

    name    of the layer's launches, as in `3.attention`
    q       address of f32[n_tokens, n_head, dim_k], scaled
    out     rows of n_head * dim_v values
    window  a key is seen while position - key < window; 0: every earlier key
    sinks, gates   addresses, 0: none; see `ops.gpu.attention`
    masks   of the keys that each token reads, see `IndexerLaunches`; 0: every earlier key
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
    masks: int = 0

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
    shape = replace(attention_shape(parts, a.cache), chooses=a.masks != 0)
    n_head_kv, dim_v = a.cache.n_head_kv, a.cache.values.dim
    splits = n_splits(parts.shape.n_context - 1, max_splits, a.window)
    sizes = partials_bytes(splits, a.n_head, dim_v, parts.n_tokens)
    partials = parts.room.place(f"attention partials {sizes[0]}", sizes[0])
    states = parts.room.place(f"attention states {sizes[1]}", sizes[1])
    parts.plan.add(
        a.name,
        attention(shape),
        attention_grid(splits, a.n_head, n_head_kv, parts.n_tokens),
        {
            **_reading(parts, a),
            "partials": partials,
            "states": states,
            "max_splits": max_splits,
            **_choice(parts, a),
        },
        shared_bytes=attention_shared_bytes(shape),
        overlapped=parts.overlapped,
    )
    parts.plan.add(
        f"{a.name}_join",
        attention_join(overlapped=parts.overlapped),
        attention_join_grid(a.n_head, dim_v, parts.n_tokens),
        {
            "counts": parts.token_count,
            "positions": parts.control("positions"),
            "partials": partials,
            "states": states,
            **_ending(a),
            "out": a.out.wanted("f32"),
            "n_head": a.n_head,
            "dim_v": dim_v,
            "n_splits": splits,
            "window": a.window,
            "max_splits": max_splits,
            **_records(a.out, "q8_256", "256"),
            **_records(a.out, "q8_32", "32"),
        },
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


def _choice(parts: PlanParts, a: PagedAttention) -> dict[str, int]:
    """The arguments that say which keys a token reads, where it has a choice."""
    return {"masks": a.masks, "mask_stride": parts.layout.max_pages} if a.masks else {}


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
