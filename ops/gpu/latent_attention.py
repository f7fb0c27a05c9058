"""Latent attention on tensor cores: many heads that read the same cached rows.

A row of the cache, f16, is a key; its first 512 values are the value.  As in `ops.gpu.attention`,
keys are taken in units of 64 at absolute positions: `latent_prompt` serves chunks of prompts,
`latent_decode` a few tokens, in place of `attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ops.gpu.attention import CHOICE_PARAMS, JOIN_BLOCK, ROW_TILE, attention_reference
from ops.gpu.attention_copies import LIST_PARAMS, choice_wait
from ops.gpu.attention_shape import UNIT_KEYS
from ops.gpu.kernel import Kernel, launch_defines
from ops.gpu.kv_layout import PAGE_TOKENS

DIM_V = 512
"""Values of a row that are multiplied by weights: two warps have 256 of them each."""
DIMS_K = (576, 512)
"""Values of a row: with a part that has positions, and without."""
ROWS = (64, 32)
"""Rows of a block: what an H100's shared memory has room for, and what an A100's has."""
WEIGHTS_ROW = 2 * UNIT_KEYS

DECODE_BLOCK = 512
"""Threads of `latent_decode`: 16 warps, for 32 values, 16 keys times a quarter, or a row each."""
SCORE_PARTS = 4
DECODE_SCORE_ROW = 4 * (UNIT_KEYS + 8)
"""Bytes from one row of scores to the next: rows beside each other in different banks."""

JOINED_VALUES = 64
"""Values of a block of `latent_join`."""
MAX_JOINED = 128


@dataclass(frozen=True)
class LatentPromptShape:
    """What the kernel's text depends on.

    dim_k    one of `DIMS_K`
    rows     one of `ROWS`
    chooses  masks say which keys each token reads (`ops.gpu.indexer`)
    listed   lists do, where a block has one token
    pairs    rows are those of `ops.gpu.latent_pairs`: f16 values, and f16 of what they leave
    """

    dim_k: int
    rows: int = ROWS[0]
    overlapped: bool = False
    chooses: bool = False
    listed: bool = False
    pairs: bool = False

    @property
    def row_bytes(self) -> int:
        return 2 * self.dim_k

    @property
    def block(self) -> int:
        """Two warps for 16 rows."""
        return 4 * self.rows

    def places(self) -> dict[str, int]:
        """Where the parts of shared memory begin, and its end; keys come first."""
        queries = UNIT_KEYS * self.row_bytes
        high = queries + 2 * self.rows * self.row_bytes
        low = high + self.rows * WEIGHTS_ROW
        peaks = low if self._rest else low + self.rows * WEIGHTS_ROW
        return {
            "QUERIES_AT": queries,
            "HIGH_AT": high,
            "LOW_AT": 2 * DIM_V if self._rest else low,
            "PEAKS_AT": peaks,
            "end": peaks + 2 * 4 * self.rows,
        }

    @property
    def shared_bytes(self) -> int:
        return self.places()["end"]

    @property
    def _rest(self) -> bool:
        """Whether rows have values that are multiplied by no weights."""
        return self.dim_k > DIM_V

    def defines(self) -> dict[str, str | int]:
        places = self.places()
        del places["end"]
        low_row = self.row_bytes if self._rest else WEIGHTS_ROW
        return {
            **places,
            "ROWS": self.rows,
            "DIM_K": self.dim_k,
            "ROW_PARTS": self.dim_k // 8,
            "KEY_ROW": self.row_bytes,
            **{f"KEYS_{n}": n * self.row_bytes for n in (16, 32, 48)},
            **(self._list_defines() if self.listed else self._copy_defines()),
            "QUERIES_LOW": self.rows * self.row_bytes,
            "LOW_ROW": low_row,
            "LOW_ROWS_8": 8 * low_row,
            "SCORES_REST": _fragment("scores_rope" if self._rest else "none"),
            "UNITS": _fragment("units_pairs" if self.pairs else "units"),
            **({"REST_AT": PAGE_TOKENS * self.row_bytes} if self.pairs else {}),
            "CHOOSE": _fragment("choice" if self.chooses else "none"),
            "LOAD_CHOICE": _fragment("choice_load" if self.chooses else "none"),
        }

    def _copy_defines(self) -> dict[str, str | int]:
        """Those of how the block's threads share a unit's rows."""
        few = self.rows < ROWS[0]
        defines: dict[str, str | int] = {
            "RUN_TOKENS": _fragment("run_tokens"),
            "RUN_AGAIN": _fragment("run_again"),
            "COPY_FIRST": _fragment("copy_first"),
            "COPY_SECOND": _fragment("copy_second"),
            "PAGE_COPIES": _fragment("copy_8" if few else "copy_4"),
            "PAGE_ROWS": PAGE_TOKENS * self.row_bytes,
            **{f"KEYS_{n}": n * self.row_bytes for n in (8, 24)},
            "CHOICE_PARAMS": CHOICE_PARAMS if self.chooses else "",
        }
        if few:
            defines["KEYS_4"] = 4 * self.row_bytes
        if self._rest:
            defines["REST_COPIES"] = _fragment("copy_2" if few else "copy_1")
        defines["COPY_REST"] = _fragment("copy_rope" if self._rest else "none")
        return defines

    def _list_defines(self) -> dict[str, str | int]:
        """Those of copies by lists."""
        return {
            "RUN_TOKENS": _fragment("run_token"),
            "RUN_AGAIN": _fragment("none"),
            "COPY_FIRST": _fragment("gather_first"),
            "COPY_SECOND": _fragment("gather_second"),
            "COPY_REST": _fragment("gather_rope" if self._rest else "none"),
            "CHOICE_PARAMS": LIST_PARAMS,
        }


def _fragment(name: str) -> str:
    return f'"inc/latent_{name}.inc.ptx"'


def latent_prompt(shape: LatentPromptShape) -> Kernel:
    """Queries of chunks of prompts over cached rows; see the kernel's header.

    Grid `latent_prompt_grid`, dynamic shared memory `LatentPromptShape.shared_bytes`.
    """
    return Kernel(
        entry="latent_prompt",
        source="latent_prompt.ptx",
        defines=shape.defines() | launch_defines(shape.block, 1, shape.overlapped),
        params=(
            *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "q")),
            *((name, "u64") for name in ("k_pages", "out")),
            *((name, "u32") for name in ("n_head", "table_stride", "k_page_bytes")),
            *((("masks", "u64"), ("mask_stride", "u32")) if shape.chooses else ()),
            *((("lists", "u64"), ("list_stride", "u32")) if shape.listed else ()),
        ),
        block=shape.block,
        reference=attention_reference,
    )


@dataclass(frozen=True)
class LatentDecodeShape:
    """What the text of `latent_decode` depends on.

    dim_k    one of `DIMS_K`
    buffers  units of keys that shared memory has room for, 2 or 1
    chooses  lists say which keys each token reads (`ops.gpu.indexer`)
    """

    dim_k: int
    buffers: int = 2
    overlapped: bool = False
    chooses: bool = False

    @property
    def row_bytes(self) -> int:
        return 2 * self.dim_k

    def places(self) -> dict[str, int]:
        """Where the parts of shared memory begin, and its end; units of keys come first."""
        scores = self.buffers * UNIT_KEYS * self.row_bytes
        high = scores + SCORE_PARTS * ROW_TILE * DECODE_SCORE_ROW
        low = high + ROW_TILE * WEIGHTS_ROW
        shrinks = low + ROW_TILE * WEIGHTS_ROW
        eight_rows, eight_keys = 8 * DECODE_SCORE_ROW, 8 * 4
        return {
            "SCORES_AT": scores,
            "SCORES_AT_8": scores + eight_rows,
            "NEXT_SCORES_AT": scores + eight_keys,
            "NEXT_SCORES_AT_8": scores + eight_keys + eight_rows,
            "HIGH_AT": high,
            "LOW_AT": low,
            "SHRINKS_AT": shrinks,
            "end": shrinks + 4 * ROW_TILE,
        }

    @property
    def shared_bytes(self) -> int:
        return self.places()["end"]

    def defines(self) -> dict[str, str | int]:
        places, two = self.places(), self.buffers > 1
        del places["end"]
        return {
            **places,
            "DIM_K": self.dim_k,
            "KEY_ROW": self.row_bytes,
            "UNIT_BYTES": UNIT_KEYS * self.row_bytes,
            **{f"KEYS_{n}": n * self.row_bytes for n in (16, 32, 48)},
            **self._copy_defines(),
            "STEPS": _fragment(f"steps_{self.dim_k // 64}"),
            "COPY_EARLY": _fragment("copy_early" if two else "none"),
            "COPY_LATE": _fragment("none" if two else "copy_late"),
        }

    def _copy_defines(self) -> dict[str, str | int]:
        """How a unit comes to shared memory: two pages, or by a list."""
        rest = self.dim_k > DIM_V
        if self.chooses:
            return {
                "COPY_UNIT": _fragment("gather_unit"),
                "GATHER_REST": _fragment("gather_rest" if rest else "none"),
                "CHOICE_PARAMS": LIST_PARAMS,
                "CHOICE_WAIT": choice_wait(self.overlapped),
            }
        return {
            "COPY_UNIT": _fragment("copy_unit"),
            "COPY_REST": _fragment("copy_column" if rest else "none"),
            "PAGE_ROWS": PAGE_TOKENS * self.row_bytes,
            **{f"KEYS_{n}": n * self.row_bytes for n in (8, 24)},
            "CHOICE_PARAMS": "",
            "CHOICE_WAIT": choice_wait(False),
        }


def latent_decode(shape: LatentDecodeShape) -> Kernel:
    """Queries of a few tokens over splits of their keys; see the kernel's header.

    Grid `latent_decode_grid`, dynamic shared memory `LatentDecodeShape.shared_bytes`; the splits
    are those of `ops.gpu.attention`, and `attention_join` puts them together.
    """
    return Kernel(
        entry="latent_decode",
        source="latent_decode.ptx",
        defines=shape.defines() | launch_defines(DECODE_BLOCK, 1, shape.overlapped),
        params=(
            *((name, "u64") for name in ("counts", "positions", "rows", "page_tables", "q")),
            *((name, "u64") for name in ("k_pages", "partials", "states")),
            *((name, "u32") for name in ("n_head", "table_stride", "k_page_bytes", "max_splits")),
            *((("lists", "u64"), ("list_stride", "u32")) if shape.chooses else ()),
        ),
        block=DECODE_BLOCK,
        reference=attention_reference,
    )


def latent_decode_grid(n_splits: int, n_head: int, n_tokens: int) -> tuple[int, int, int]:
    """A block for a split, 16 heads, and a token: as `attention_grid`."""
    return n_splits, -(-n_head // ROW_TILE), n_tokens


def latent_join(*, overlapped: bool = False) -> Kernel:
    """The splits of a token -> rows of its values; see the kernel's header.

    For splits without window, sinks and gates, up to `MAX_JOINED`. Grid `latent_join_grid`; no
    dynamic shared memory.
    """
    return Kernel(
        entry="latent_join",
        source="latent_join.ptx",
        defines=launch_defines(JOIN_BLOCK, 2, overlapped),
        params=(
            *((name, "u64") for name in ("counts", "positions", "partials", "states", "out")),
            *((name, "u32") for name in ("n_head", "dim_v", "n_splits", "max_splits")),
        ),
        block=JOIN_BLOCK,
        reference=attention_reference,
    )


def latent_join_grid(n_head: int, dim_v: int, n_tokens: int) -> tuple[int, int]:
    """A block for 64 values of a head."""
    return n_head * dim_v // JOINED_VALUES, n_tokens


def latent_prompt_grid(rows: int, n_head: int, n_tokens: int) -> tuple[int, int]:
    """A block for `rows` rows: all heads of some tokens, or some heads of one."""
    return -(-n_tokens // (rows // min(n_head, rows))), -(-n_head // rows)


def prompt_shapes() -> Iterator[LatentPromptShape]:
    """Both widths and numbers of rows, with and without masks, most with lists; some of pairs."""
    for dim_k in DIMS_K:
        for rows in ROWS:
            for chooses in (False, True):
                yield LatentPromptShape(dim_k, rows, rows == ROWS[0], chooses)
        yield LatentPromptShape(dim_k, overlapped=True, listed=True)
        yield LatentPromptShape(dim_k, overlapped=True, pairs=True)
    dim_k = DIMS_K[0]
    yield LatentPromptShape(dim_k, overlapped=True, chooses=True, pairs=True)
    yield LatentPromptShape(dim_k, overlapped=True, listed=True, pairs=True)
    yield LatentPromptShape(dim_k, ROWS[1], pairs=True)


def decode_shapes() -> Iterator[LatentDecodeShape]:
    """Both widths and numbers of buffers; alone and overlapped; without lists and with them."""
    for dim_k in DIMS_K:
        for buffers in (1, 2):
            for early in (False, True):
                for chooses in (False, True):
                    yield LatentDecodeShape(dim_k, buffers, early, chooses)


def variants() -> Iterator[tuple[str, Kernel]]:
    """The kernels of the shipped shapes."""
    for shape in prompt_shapes():
        words = f"{', chosen' * shape.chooses}{', listed' * shape.listed}"
        words += f"{', pairs' * shape.pairs}{', overlapped' * shape.overlapped}"
        yield f"latent_prompt ({shape.dim_k}, {shape.rows} rows{words})", latent_prompt(shape)
    for few in decode_shapes():
        words = f"{', chosen' * few.chooses}{', overlapped' * few.overlapped}"
        name = f"{few.dim_k}, {few.buffers} buffers{words}"
        yield f"latent_decode ({name})", latent_decode(few)
    yield "latent_join", latent_join()
    yield "latent_join (overlapped)", latent_join(overlapped=True)
