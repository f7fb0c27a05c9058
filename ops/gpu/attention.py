"""The GPU attention kernels over paged keys and values, and what all of them must equal.

`attention` serves a few tokens, each over splits of its keys, and `attention_join` puts the splits
together; `attention_prompt` serves chunks of a prompt.  Keys are taken in units of 64 at absolute
positions, so a token's bits depend neither on the tokens beside it nor on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ops.gpu.attention_copies import (
    LIST_PARAMS,
    choice_wait,
    fragment,
    list_copy_defines,
    page_copy_defines,
)
from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import PAGE_TOKENS, VALUE_DIMS, GPUPageLayout
from ops.quants.block import F32

CHOICE_PARAMS = ", .param .u64 masks, .param .u32 mask_stride"

UNIT_KEYS = 64
"""Keys of one softmax step."""
BLOCKS_AT_ONCE = 512
"""Blocks of `attention` that one token's keys are spread over: an H200 runs 528 at a time."""
WIDE_BLOCKS_AT_ONCE = 128
"""The same of heads so wide that a multiprocessor has room for one block."""
ROW_TILE = 16
"""Rows of a tensor-core product."""
PROMPT_ROWS = 64
"""Rows of a block of `attention_prompt`."""
SCORE_ROW = 320
"""Bytes from one row of scores to the next: rows beside each other in different banks."""
STATE_ROW = 16
MIN_CHOSEN_DIM_V = 32
MAX_DIM_V = 512
"""Dimensions of values: a block has two threads for each."""

SHIPPED_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)
"""(dim_k, dim_v) that are tested; the factories take other multiples up to 512 values."""
LATENT_DIMS = (576, 512)
"""Those of latent attention, whose prompts go through `attention` too."""

JOIN_BLOCK = 256
JOIN_VALUES = 256


@dataclass(frozen=True)
class AttentionShape:
    """What the text of an attention kernel depends on; dimensions per head: dim_k is a multiple of
    8, dim_v of 16.

    row_buffers  0: values have pages of their own. Else a value is the first dim_v dimensions of
                 its key, an f16 row, and shared memory has room for 1 or 2 units of rows
    chooses      lists say which keys each token reads (`ops.gpu.indexer`)

    Raises: ValueError as `GPUPageLayout`, or when a block had too many threads, or too few for its
    lists.
    """

    dim_k: int
    dim_v: int
    k_cache: str = "f16"
    v_cache: str = "f16"
    overlapped: bool = False
    row_buffers: int = 0
    chooses: bool = False

    def __post_init__(self) -> None:
        if self.dim_v > MAX_DIM_V:
            raise ValueError(
                f"GPU attention takes values of up to {MAX_DIM_V} dimensions, not {self.dim_v}"
            )
        if self.row_buffers and (self.k_cache != "f16" or self.dim_v > self.dim_k):
            raise ValueError(f"no rows of {self.k_cache} are keys and values at once")
        if self.chooses and self.dim_v < MIN_CHOSEN_DIM_V:
            raise ValueError(f"no lists of keys with values of {self.dim_v} dimensions")
        _ = self.keys, self.values

    @property
    def keys(self) -> GPUPageLayout:
        return GPUPageLayout("keys", self.k_cache, self.dim_k)

    @property
    def values(self) -> GPUPageLayout:
        return GPUPageLayout("values", self.v_cache, self.dim_v)

    @property
    def block(self) -> int:
        """A warp for 16 dimensions of the values."""
        return self.dim_v // VALUE_DIMS * 32

    @property
    def query_row(self) -> int:
        """Bytes from one row of queries to the next: rows beside each other in different banks."""
        row = 2 * self.keys.padded_dim
        return row if row % 128 else row + 64

    @property
    def key_pad(self) -> int:
        """Bytes behind each key in shared memory: the lanes that read two keys use all banks."""
        row, lane = self.keys.padded_dim * self.keys.element_bytes, 8 * self.keys.element_bytes
        wanted = {16: 64, 32: 16, 8: 32}[lane]
        return (wanted - row) % 128 if (wanted - row) % 128 <= 64 else 0

    @property
    def key_place(self) -> int:
        """Bytes of one kv head of a page's keys in shared memory."""
        groups = PAGE_TOKENS // 8 * 16 if self.row_buffers else 0
        return self.keys.head_bytes + PAGE_TOKENS * self.key_pad + groups

    def places(self, n_rows: int) -> tuple[int, int, int, int, int]:
        """Where values, queries, scores and states begin in shared memory, and its bytes."""
        pages = UNIT_KEYS // PAGE_TOKENS
        values = pages * self.key_place
        queries = values + pages * self.values.head_bytes
        if self.row_buffers:
            queries = values = self.row_buffers * pages * self.key_place
            values //= 2
        scores = queries + 2 * n_rows * self.query_row
        states = scores + n_rows * SCORE_ROW
        return values, queries, scores, states, states + n_rows * STATE_ROW

    def defines(self, n_rows: int, min_blocks: int) -> dict[str, str | int]:
        """The macros that both attention kernels take, for `n_rows` rows of a block."""
        values_at, queries_at, scores_at, states_at, _ = self.places(n_rows)
        keys, values, q_row = self.keys, self.values, self.query_row
        return {
            **launch_defines(self.block, min_blocks, self.overlapped),
            "DIM_K": self.dim_k,
            "PADDED_K": keys.padded_dim,
            "DIM_V": self.dim_v,
            "KEY_BYTES": keys.head_bytes,
            "KEY_ROW": keys.padded_dim * keys.element_bytes,
            "KEY_LANE": 8 * keys.element_bytes,
            "KEY_CHUNK": 32 * keys.element_bytes,
            "KEY_GROUPS": keys.padded_dim // 32 * 4,
            "KEY_STEP": keys.padded_dim * keys.element_bytes + self.key_pad,
            "KEY_PLACE": self.key_place,
            "KEY_SCALES": keys.value_bytes + PAGE_TOKENS * self.key_pad,
            "VALUE_BYTES": values.head_bytes,
            **self._value_defines(),
            "Q_ROW": q_row,
            "Q_ROW_8": 8 * q_row,
            "QUERY_LOW": n_rows * q_row,
            "QUERY_LOW_8": (n_rows + 8) * q_row,
            "VALUES_AT": values_at,
            "QUERIES_AT": queries_at,
            "SCORES_AT": scores_at,
            "STATES_AT": states_at,
            **_fragments("KEYS", "KEY_PRODUCT", self.k_cache, "keys"),
        }

    def _value_defines(self) -> dict[str, str | int]:
        """Those of how values are read."""
        if self.row_buffers:
            rows = {"LOAD_VALUES": fragment("load_rows"), "MASK_VALUES": fragment("mask_f16")}
            return {**rows, "VALUE_PRODUCT": fragment("product_f16"), "VALUE_ROW_8": 16}
        size = self.values.element_bytes
        return {
            "VALUE_ROW": PAGE_TOKENS * size,
            "VALUE_ROW_8": 8 * PAGE_TOKENS * size,
            "VALUE_LANE": 8 * size,
            "VALUE_SCALES": self.values.value_bytes,
            **_fragments("VALUES", "VALUE_PRODUCT", self.v_cache, "values"),
            "MASK_VALUES": fragment("mask", "f16" if self.v_cache == "f16" else "split"),
        }


def _copy_defines(shape: AttentionShape) -> dict[str, str | int]:
    """Those of how units come to shared memory."""
    if shape.chooses:
        return list_copy_defines(shape.keys, shape.values, shape.row_buffers)
    return page_copy_defines(shape.row_buffers) | {"KEY_PAD": shape.key_pad}


def _fragments(load: str, product: str, cache_type: str, side: str) -> dict[str, str]:
    """How cached values get into registers and are multiplied there."""
    return {
        f"LOAD_{load}": fragment(side if cache_type == "q8_0" else "load", cache_type),
        product: fragment("product", "f16" if cache_type == "f16" else "split"),
    }


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


def shipped_shapes() -> Iterator[AttentionShape]:
    """Every pair of dimensions with f16; the other cache types, mixed, with a few."""
    for dim_k, dim_v in SHIPPED_DIMS:
        for overlapped in (False, True):
            yield AttentionShape(dim_k, dim_v, overlapped=overlapped)
    yield AttentionShape(*LATENT_DIMS, overlapped=True, row_buffers=2)
    yield AttentionShape(*LATENT_DIMS, row_buffers=1)
    yield AttentionShape(*LATENT_DIMS, "q8_0", "q8_0", overlapped=True)
    for early in (False, True):
        yield AttentionShape(256, 256, overlapped=early, chooses=True)
        yield AttentionShape(*LATENT_DIMS, overlapped=early, row_buffers=1 + early, chooses=True)
    yield AttentionShape(64, 64, "q8_0", "q8_0", overlapped=True, chooses=True)
    yield AttentionShape(128, 128, "q8_0", "q8_0", overlapped=True)
    for types in (("q8_0", "q8_0"), ("f32", "f32"), ("f16", "q8_0"), ("q8_0", "f16")):
        yield AttentionShape(128, 128, *types)


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
