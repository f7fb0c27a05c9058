"""The GPU kernel `embed`: rows of the token embedding as f32, the values of ops.quants.

token_ids  i32[n_tokens]: ids; -1 - row stands for what lies in sampled[row]
sampled    i32[*]: tokens that the step before chose; -1, which none is, counts as 0
weights    the embedding matrix, as `ops.gpu.linear.Segment.weights`
table      the format's grid (`ops.gpu.kernel.format_table`), or anything
x          f32[n_tokens, n]
count      address of the u32 number of tokens: blocks of later ones leave
n          values a row: a multiple of 32 and the format's block; of float formats of 4
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.gpu.kernel import (
    CHUNK_ELEMS,
    Kernel,
    format_table,
    launch_defines,
    stage_defines,
    unpack_fragment,
)
from ops.gpu.row_launch import GPU_FORMATS, is_float
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

PARAMS = (
    ("token_ids", "u64"),
    ("sampled", "u64"),
    ("weights", "u64"),
    ("table", "u64"),
    ("x", "u64"),
    ("count", "u64"),
    ("n", "u32"),
)
BLOCK = 64
"""Threads of a block; each takes 32 values."""


def embed(fmt: BlockFormat, *, overlapped: bool = False) -> Kernel:
    """x[t] = row token_ids[t] of the matrix; grid `grid(n, n_tokens)`.

    Raises:
        LookupError: no GPU kernel reads the format.
    """
    if fmt.name not in GPU_FORMATS:
        raise LookupError(f"no GPU kernels for {fmt.name}; there are {', '.join(GPU_FORMATS)}")
    of_format = _float_defines(fmt) if is_float(fmt) else _block_defines(fmt)
    return Kernel(
        entry=f"embed_{fmt.name.lower()}",
        source="embed_float.ptx" if is_float(fmt) else "embed.ptx",
        defines=of_format | launch_defines(BLOCK, 1, overlapped),
        params=PARAMS,
        block=BLOCK,
        reference=embed_reference,
    )


def grid(n: int, n_tokens: int) -> tuple[int, int]:
    """Blocks for rows of n values."""
    return -(-n // CHUNK_ELEMS), n_tokens


def shared_bytes(fmt: BlockFormat) -> int:
    """Dynamic shared memory of a block: a chunk of a row, and the format's grid."""
    return 0 if is_float(fmt) else _table_at(fmt) + format_table(fmt).nbytes


def embed_reference(fmt: BlockFormat, rows: U8) -> F32:
    """u8[n_tokens, row_bytes] -> f32[n_tokens, n]."""
    return fmt.dequantize_rows(rows)


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format once, overlapped."""
    for name in GPU_FORMATS:
        kernel = embed(FORMATS[name], overlapped=True)
        yield kernel.entry, kernel


def _float_defines(fmt: BlockFormat) -> dict[str, str | int]:
    return {
        "ELEM_BYTES": fmt.block_bytes,
        "LOAD_4": f'"inc/load_4_{fmt.name.lower()}.inc.ptx"',
    }


def _block_defines(fmt: BlockFormat) -> dict[str, str | int]:
    table_bytes = format_table(fmt).nbytes
    return {
        **stage_defines(fmt, BLOCK),
        "TABLE_AT": _table_at(fmt),
        **({"TABLE_BYTES": table_bytes} if table_bytes else {}),
        "LOAD_TABLE": f'"inc/table_{"plain" if table_bytes else "none"}.inc.ptx"',
        "UNPACK": unpack_fragment(fmt),
        "ADD_MINS": f'"inc/add_mins_{"4" if fmt.has_mins else "none"}.inc.ptx"',
    }


def _table_at(fmt: BlockFormat) -> int:
    """Where the grid lies: behind a chunk that begins within the first 16 bytes."""
    return -(-fmt.row_bytes(CHUNK_ELEMS) // 16) * 16 + 16
