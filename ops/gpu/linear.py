"""The GPU kernel `linear`: matrices that meet the same vectors, times a few of them.

y[t, y_first + r] = scale * (W[r] . x[t]) + bias[r], one launch for all matrices of one format that
have the same input: query, key and value, or gate and up of a dense block.  Each token reads the
weights anew; from about four tokens on `gemm` is quicker.

records     u8[n_tokens, record_bytes]: activation records of the format's kind, of `norm` or
            `quantize`; f32 rows for float formats
segments    `SEGMENT` records: the matrices, see `segments`
table       the format's grid (`ops.gpu.kernel.format_table`), or anything
y           f32[n_tokens, y_stride]
count       address of the u32 number of tokens: blocks of later ones leave
n           values a row: a multiple of the activation's group and the format's block; of float
            formats a multiple of 4
n_segments  matrices
y_stride    values from a token's y to the next one's
scales_offset, sums_offset, record_bytes   `ops.arithmetic.activation_layout` of n
late        not 0: what precedes the launch does not make the records, and runs beside it: it is
            only waited for before y is written
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import dot_rows
from ops.gpu.kernel import CHUNK_ELEMS, Kernel
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    FLOAT_FORMATS,
    GPU_FORMATS,
    LONG_ROW_BUFFERS,
    MANY_ROWS,
    ONE_ROUND,
    PAIRED,
    TEAMS,
    TWO_BLOCK_ROWS,
    RowLaunch,
    best_launch,
    few_rows_launch,
    is_float,
    paired_launch,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

PARAMS = (
    ("records", "u64"),
    ("segments", "u64"),
    ("table", "u64"),
    ("y", "u64"),
    ("count", "u64"),
    ("n", "u32"),
    ("n_segments", "u32"),
    ("y_stride", "u32"),
    ("scales_offset", "u32"),
    ("sums_offset", "u32"),
    ("record_bytes", "u32"),
    ("late", "u32"),
)

SEGMENT = np.dtype(
    [
        ("weights", "<u8"),
        ("bias", "<u8"),
        ("first_block", "<u4"),
        ("n_rows", "<u4"),
        ("y_first", "<u4"),
        ("scale", "<f4"),
    ]
)
"""A matrix as the kernel reads it; blocks from first_block to the next one's are its own."""


@dataclass(frozen=True)
class Segment:
    """A matrix of a launch.

    weights  address of n_rows rows, a multiple of 16, as many bytes behind the end readable as
             round it up to 16
    y_first  where its results begin in a token's y
    bias     address of f32[n_rows]; 0: none
    scale    multiplies the products before the bias
    """

    weights: int
    n_rows: int
    y_first: int = 0
    bias: int = 0
    scale: float = 1.0


def segments(launch: RowLaunch, matrices: Sequence[Segment]) -> tuple[NDArray[np.void], int]:
    """The table of a launch's matrices, and the blocks of its grid in x (y is the tokens)."""
    table = np.zeros(len(matrices), SEGMENT)
    n_blocks = 0
    for row, m in zip(table, matrices, strict=True):
        row["weights"], row["bias"], row["scale"] = m.weights, m.bias, m.scale
        row["n_rows"], row["y_first"], row["first_block"] = m.n_rows, m.y_first, n_blocks
        n_blocks += launch.blocks(m.n_rows)
    return table, n_blocks


def linear(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """Products of one format; grid (blocks of `segments`, n_tokens).

    Raises:
        LookupError: no GPU kernel reads the format.
        ValueError: float rows have one round.
    """
    if fmt.name not in GPU_FORMATS:
        raise LookupError(f"no GPU kernels for {fmt.name}; there are {', '.join(GPU_FORMATS)}")
    if is_float(fmt) and launch.rounds != 1:
        raise ValueError(f"a warp takes one pair of {fmt.name} rows, not {launch.rounds}")
    return Kernel(
        entry=f"linear_{fmt.name.lower()}",
        source="linear_float.ptx" if is_float(fmt) else "linear.ptx",
        defines=launch.fixed_defines(fmt),
        params=PARAMS,
        block=launch.block,
        reference=linear_reference,
    )


def linear_reference(
    fmt: BlockFormat, weights: U8, records: U8, bias: F32 | None = None, scale: float = 1.0
) -> F32:
    """Rows u8[n_rows, row_bytes] x records -> f32[n_tokens, n_rows]."""
    y = dot_rows(fmt, weights, records) * np.float32(scale)
    return y if bias is None else y + bias


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format and team, overlapped."""
    for launch, fmt in launches():
        kernel = linear(fmt, launch)
        how = [f"team {launch.team}"]
        how += ["one round"] if launch.rounds == 1 and not is_float(fmt) else []
        how += ["64 threads"] if launch.block == 64 and not is_float(fmt) else []
        how += ["all under way"] if launch.eager else []
        how += [f"pairs of units, {launch.block} threads"] if launch.paired else []
        yield f"{kernel.entry} ({', '.join(how)})", kernel


def launches() -> Iterator[tuple[RowLaunch, BlockFormat]]:
    """Those of the kernels that ship."""
    for name in BLOCK_FORMATS:
        for team in TEAMS:
            for rounds in (1, 2) if name in ONE_ROUND else (2,):
                yield RowLaunch(team, rounds=rounds, overlapped=True), FORMATS[name]
    for name in sorted(ONE_ROUND):
        for n in (CHUNK_ELEMS, LONG_ROW_BUFFERS * CHUNK_ELEMS):
            yield few_rows_launch(n, overlapped=True), FORMATS[name]
    for name in sorted(PAIRED):
        for n_rows in (0, MANY_ROWS, TWO_BLOCK_ROWS + 1):
            yield paired_launch(n_rows, overlapped=True), FORMATS[name]
    for name in FLOAT_FORMATS:
        yield best_launch(FORMATS[name], 0, overlapped=True), FORMATS[name]
