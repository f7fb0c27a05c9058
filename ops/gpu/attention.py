"""The GPU attention kernels over paged keys and values, and what all of them must equal.

`attention` serves a few tokens, each over splits of its keys, and `attention_join` puts the splits
together; `attention_prompt` serves chunks of a prompt.  Keys are taken in units of 64 at absolute
positions, so a token's bits depend neither on the tokens beside it nor on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.gpu.attention_copies import (
    LIST_PARAMS,
    choice_wait,
    list_copy_defines,
    page_copy_defines,
)
from ops.gpu.attention_shape import LATENT_DIMS, UNIT_KEYS, AttentionShape, shipped_shapes
from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import PAGE_TOKENS
from ops.quants.block import F32

CHOICE_PARAMS = ", .param .u64 masks, .param .u32 mask_stride"

BLOCKS_AT_ONCE = 512
"""Blocks of `attention` that one token's keys are spread over: an H200 runs 528 at a time."""
WIDE_BLOCKS_AT_ONCE = 128
"""The same of heads so wide that a multiprocessor has room for one block."""
ROW_TILE = 16
"""Rows of a tensor-core product."""
PROMPT_ROWS = 64
"""Rows of a block of `attention_prompt`."""

JOIN_BLOCK = 256
JOIN_VALUES = 256


def _copy_defines(shape: AttentionShape) -> dict[str, str | int]:
    """Those of how units come to shared memory."""
    if shape.chooses:
        return list_copy_defines(shape.keys, shape.values, shape.row_buffers)
    return page_copy_defines(shape.row_buffers) | {"KEY_PAD": shape.key_pad}


def attention(shape: AttentionShape) -> Kernel:
    """Queries of a few tokens over splits of their keys; see the kernel's header.

    Grid `attention_grid`, dynamic shared memory `attention_shared_bytes`.
    """
    return Kernel(
        entry="attention",
        source="attention.ptx",
        defines={
            **shape.defines(ROW_TILE, _blocks_in_registers(shape)),
            **_copy_defines(shape),
            "ROWS_FURTHER": 8 * 4 * shape.dim_v,
            "CHOICE_WAIT": choice_wait(shape.chooses and shape.overlapped),
            "CHOICE_PARAMS": LIST_PARAMS if shape.chooses else "",
        },
        params=(
            *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "q")),
            *((name, "u64") for name in ("k_pages", "v_pages", "partials", "states")),
            *((name, "u32") for name in ("n_head", "group", "table_stride")),
            *((name, "u32") for name in ("k_page_bytes", "v_page_bytes", "window", "max_splits")),
            *((("lists", "u64"), ("list_stride", "u32")) if shape.chooses else ()),
        ),
        block=shape.block,
        reference=attention_reference,
    )


def _blocks_in_registers(shape: AttentionShape) -> int:
    """Blocks of a multiprocessor: 64 registers a thread do for sm_90, not for sm_80."""
    return max(1, (1024 if shape.overlapped else 768) // shape.block)


def max_splits(n_head: int, n_head_kv: int, blocks_at_once: int = BLOCKS_AT_ONCE) -> int:
    """Most splits of a token, the same for every launch of a model: enough to fill a card."""
    return max(16, min(128, blocks_at_once // attention_grid(1, n_head, n_head_kv, 1)[1]))


def n_splits(max_position: int, max_splits: int, window: int = 0) -> int:
    """Splits that serve every position up to this one: the first number of the grid."""
    n_units = max_position // UNIT_KEYS + 1
    if window:
        n_units = min(n_units, (window + UNIT_KEYS - 2) // UNIT_KEYS + 1)
    return min(max_splits, n_units)


def attention_grid(
    n_splits: int, n_head: int, n_head_kv: int, n_tokens: int
) -> tuple[int, int, int]:
    """A block for a split, up to 16 heads of one kv head, and a token."""
    group = n_head // n_head_kv
    return n_splits, n_head_kv * -(-group // ROW_TILE), n_tokens


def attention_shared_bytes(shape: AttentionShape) -> int:
    return shape.places(ROW_TILE)[-1]


def partials_bytes(n_splits: int, n_head: int, dim_v: int, n_tokens: int) -> tuple[int, int]:
    """Room for the partial results: bytes of `partials` and of `states`."""
    n_parts = n_tokens * n_splits * n_head
    return 4 * n_parts * dim_v, 8 * n_parts


def attention_join(*, overlapped: bool = False) -> Kernel:
    """The splits of `attention` -> output rows and records; see the kernel's header.

    Grid `attention_join_grid`; no dynamic shared memory.
    """
    return Kernel(
        entry="attention_join",
        source="attention_join.ptx",
        defines=launch_defines(JOIN_BLOCK, 2, overlapped),
        params=(
            *((name, "u64") for name in ("counts", "positions", "partials", "states")),
            *((name, "u64") for name in ("sinks", "gates", "out", "records_256", "records_32")),
            *((name, "u32") for name in ("n_head", "dim_v", "n_splits", "window", "max_splits")),
            *((name, "u32") for name in ("gate_row", "gate_stride")),
            *((f"{name}_256", "u32") for name in ("scales", "sums", "bytes")),
            *((f"{name}_32", "u32") for name in ("scales", "sums", "bytes")),
            ("value_scale", "f32"),
        ),
        block=JOIN_BLOCK,
        reference=attention_reference,
    )


def attention_join_grid(n_head: int, dim_v: int, n_tokens: int) -> tuple[int, int]:
    """A block for 256 values of the output."""
    return -(-n_head * dim_v // JOIN_VALUES), n_tokens


def attention_prompt(shape: AttentionShape) -> Kernel:
    """Chunks of prompts with tensor cores; see the kernel's header.

    Grid `attention_prompt_grid`, dynamic shared memory `attention_prompt_shared_bytes`.
    """
    keys, values = shape.keys, shape.values
    block = -(-shape.dim_v // 32) * 64
    defines = shape.defines(PROMPT_ROWS, 2 if block <= 256 else 1) | {
        "KEY_PAD": shape.key_pad,
        "KEY_STEP_2": 2 * (keys.padded_dim * keys.element_bytes + shape.key_pad),
        "KEY_GROUPS_2": 2 * keys.padded_dim // 32 * 4,
        "Q_ROW_16": 16 * shape.query_row,
        "VALUE_ROW_16": 16 * PAGE_TOKENS * values.element_bytes,
    }
    return Kernel(
        entry="attention_prompt",
        source="attention_prompt.ptx",
        defines=defines | launch_defines(block, 2 if block <= 256 else 1, shape.overlapped),
        params=(
            *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "q")),
            *((name, "u64") for name in ("k_pages", "v_pages", "sinks", "gates", "out")),
            *((name, "u32") for name in ("n_head", "group", "table_stride")),
            *((name, "u32") for name in ("k_page_bytes", "v_page_bytes", "window")),
            *((name, "u32") for name in ("gate_row", "gate_stride")),
            ("value_scale", "f32"),
        ),
        block=block,
        reference=attention_reference,
    )


def attention_prompt_grid(n_head: int, n_head_kv: int, n_tokens: int) -> tuple[int, int]:
    """A block for 64 rows, the heads of one kv head of some tokens.

    Raises: ValueError when more than 64 heads share a kv head.
    """
    group = n_head // n_head_kv
    if group > PROMPT_ROWS:
        raise ValueError(f"attention_prompt takes up to {PROMPT_ROWS} heads a kv head, not {group}")
    return -(-n_tokens // (PROMPT_ROWS // group)), n_head_kv


def attention_prompt_shared_bytes(shape: AttentionShape) -> int:
    """Up to 99 KiB, what every card has, with f16 and heads of 128; more with larger ones."""
    return shape.places(PROMPT_ROWS)[-1]


def attention_reference(
    q: F32,
    keys: F32,
    values: F32,
    position: int,
    window: int = 0,
    sinks: F32 | None = None,
    value_scale: float = 1.0,
) -> F32:
    """One token's output f32[n_head, dim_v], in f64.

    q f32[n_head, dim_k], scaled; keys f32[n_head_kv, n_keys, dim_k] and values
    f32[n_head_kv, n_keys, dim_v] by position; sinks f32[n_head].
    """
    n_head, n_head_kv = len(q), len(keys)
    first = max(0, position + 1 - window) if window else 0
    k = np.repeat(keys[:, first : position + 1].astype(np.float64), n_head // n_head_kv, 0)
    v = np.repeat(values[:, first : position + 1].astype(np.float64), n_head // n_head_kv, 0)
    scores = np.einsum("hd,hkd->hk", q.astype(np.float64), k)
    sink = np.full(n_head, -np.inf) if sinks is None else sinks.astype(np.float64)
    peak = np.maximum(scores.max(-1), sink)
    weights = np.exp(scores - peak[:, None])
    total = weights.sum(-1) + np.exp(sink - peak)
    result: F32 = (value_scale * np.einsum("hk,hkd->hd", weights, v) / total[:, None]).astype(
        np.float32
    )
    return result


def variants() -> Iterator[tuple[str, Kernel]]:
    """The kernels of the shipped shapes, and the join alone and overlapped."""
    for shape in shipped_shapes():
        variant = _shape_name(shape)
        yield f"attention ({variant})", attention(shape)
        if (shape.dim_k, shape.dim_v) != LATENT_DIMS and not shape.chooses:
            yield f"attention_prompt ({variant})", attention_prompt(shape)
    yield "attention_join", attention_join()
    yield "attention_join (overlapped)", attention_join(overlapped=True)


def _shape_name(shape: AttentionShape) -> str:
    """What tells a shipped shape from the others."""
    types = "" if shape.k_cache == shape.v_cache == "f16" else f", {shape.k_cache} {shape.v_cache}"
    rows = f", rows in {shape.row_buffers}" if shape.row_buffers else ""
    rows += ", chosen" if shape.chooses else ""
    wait = ", overlapped" if shape.overlapped else ""
    return f"{shape.dim_k} {shape.dim_v}{types}{rows}{wait}"
