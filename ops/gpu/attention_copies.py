"""How `attention` brings a unit of keys and values to shared memory: whole pages, or by lists."""

from __future__ import annotations

from ops.gpu.kernel import PIECE_BYTES, WARP
from ops.gpu.kv_layout import GPUPageLayout

COPY_MACROS = ("COPY_KEYS", "COPY_VALUES", "COPY_NEXT_KEYS", "COPY_NEXT_VALUES")
PAGE_COPIES = (
    ("copy_keys", "copy_values", "copy_next_keys", "copy_next_values"),
    ("rows_first", "rows_none", "rows_none", "rows_again"),
    ("rows_first", "rows_none", "rows_next", "rows_swap"),
)
"""The fragments of these macros, by `AttentionShape.row_buffers`."""
LIST_COPIES = (
    ("gather_first", "gather_values", "gather_ahead", "gather_values"),
    ("gather_first", "rows_none", "rows_none", "gather_again"),
    ("gather_first", "rows_none", "gather_next", "rows_swap"),
)
"""The same of tokens that have lists."""
LIST_PARAMS = ", .param .u64 lists, .param .u32 list_stride"
LIST_KEYS = 4
"""Keys that lie beside each other: one number of a list."""


def fragment(*words: str) -> str:
    """A macro's value: the file of an attention fragment."""
    return f'"inc/attention_{"_".join(words)}.inc.ptx"'


def choice_wait(early: bool) -> str:
    """The fragment that waits for the lists: early where the kernel before writes them."""
    return f'"inc/grid_wait{"" if early else "_none"}.inc.ptx"'


def page_copy_defines(row_buffers: int) -> dict[str, str | int]:
    """The macros of copies of pages."""
    return _copies(PAGE_COPIES[row_buffers], row_buffers)


def list_copy_defines(
    keys: GPUPageLayout, values: GPUPageLayout, row_buffers: int
) -> dict[str, str | int]:
    """The macros of copies by lists; keys and values may have scales."""
    defines = _copies(LIST_COPIES[row_buffers], row_buffers)
    defines["KEY_GAP"] = 16 if row_buffers else 0
    is_long = keys.padded_dim * keys.element_bytes > PIECE_BYTES * WARP
    defines["GATHER_ROW"] = fragment("gather_long_row" if is_long else "gather_row")
    has_scales = keys.cache_type == "q8_0"
    defines["GATHER_SCALES"] = fragment("gather_key_scales" if has_scales else "gather_none")
    if has_scales:
        defines["KEYS_END"] = keys.value_bytes
    if not row_buffers:
        defines["QUAD_BYTES"] = LIST_KEYS * values.element_bytes
        scales = "gather_value_scales" if values.cache_type == "q8_0" else "gather_none"
        defines["GATHER_VALUE_SCALES"] = fragment(scales)
    return defines


def _copies(names: tuple[str, ...], row_buffers: int) -> dict[str, str | int]:
    places = ("rows_key", "rows_value") if row_buffers else ("key_place", "value_place")
    return {
        **{macro: fragment(name) for macro, name in zip(COPY_MACROS, names, strict=True)},
        "PLACE_KEY": fragment(places[0]),
        "PLACE_VALUE": fragment(places[1]),
    }
