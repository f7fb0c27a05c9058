"""AttentionShape: what the text of a GPU attention kernel depends on, and its shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ops.gpu.attention_copies import fragment
from ops.gpu.kernel import launch_defines
from ops.gpu.kv_layout import PAGE_TOKENS, VALUE_DIMS, GPUPageLayout

UNIT_KEYS = 64
"""Keys of one softmax step."""
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

    @cached_property
    def keys(self) -> GPUPageLayout:
        return GPUPageLayout("keys", self.k_cache, self.dim_k)

    @cached_property
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

    @cached_property
    def key_pad(self) -> int:
        """Bytes behind each key in shared memory: the lanes that read two keys use all banks."""
        row, lane = self.keys.padded_dim * self.keys.element_bytes, 8 * self.keys.element_bytes
        wanted = {16: 64, 32: 16, 8: 32}[lane]
        return (wanted - row) % 128 if (wanted - row) % 128 <= 64 else 0

    @cached_property
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


def _fragments(load: str, product: str, cache_type: str, side: str) -> dict[str, str]:
    """How cached values get into registers and are multiplied there."""
    return {
        f"LOAD_{load}": fragment(side if cache_type == "q8_0" else "load", cache_type),
        product: fragment("product", "f16" if cache_type == "f16" else "split"),
    }


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
