"""`linear` against `ops.arithmetic`: two or three matrices, two of three tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.linear import Segment, launches, linear, linear_reference, segments
from ops.gpu.row_launch import GPU_FORMATS, PAIRED_VALUES, RowLaunch, best_launch, is_float
from ops.quants import FORMATS, BlockFormat
from tests.support.blocks import random_rows
from tests.support.cases.case import Case, Outcome
from tests.support.cases.expert import (
    ODD_BLOCKS,
    UNTOUCHED,
    activations,
    place_matrix,
    place_table,
)
from tests.support.machines import Machine

Shape = tuple[int, tuple[int, ...]]
"""Values of a row, rows of the matrices."""

LARGE = [(2048, (4096, 512, 512)), (4096, (2048,)), (768, (2048, 2048))]
LARGE_FLOAT = [(2048, (128,)), (2880, (32, 128)), (7168, (256,)), (10240, (64,))]

N_TOKENS, N_COUNTED = 3, 2
GAP = 5
"""Values of y before each matrix's that nothing writes."""


def small(fmt: BlockFormat) -> list[Shape]:
    """More than a chunk or more than a round, with rows left over; of floats also values, and more
    chunks than buffers."""
    if is_float(fmt):
        return [(1100, (3, 10)), (260, (70,)), (8772, (3,))]
    return [(2560 if ODD_BLOCKS % fmt.block_elems else ODD_BLOCKS, (3, 10)), (768, (70,))]


def run_linear(
    fmt: BlockFormat, launch: RowLaunch, n: int, rows: tuple[int, ...], m: Machine
) -> Outcome:
    """y f32[3, y_stride]; the third token is beyond the count, the first matrix has no bias."""
    rng = np.random.default_rng(3)
    matrices = [random_rows(fmt, n_rows, n, seed) for seed, n_rows in enumerate(rows)]
    biases = [
        rng.normal(size=n_rows).astype(np.float32) if i else None for i, n_rows in enumerate(rows)
    ]
    scales = [1.0 + 0.75 * i for i in range(len(rows))]
    records = quantize_rows(fmt.activation, activations(N_TOKENS, n, seed=9))
    starts = GAP + np.cumsum([0, *(n_rows + GAP for n_rows in rows)])
    expected = np.full((N_TOKENS, int(starts[-1])), UNTOUCHED)
    placed = []
    for matrix, bias, scale, start in zip(matrices, biases, scales, starts, strict=False):
        counted = records[:N_COUNTED]
        product = linear_reference(fmt, matrix, counted, bias, scale)
        expected[:N_COUNTED, start : start + len(matrix)] = product
        at = 0 if bias is None else m.place(bias, writable=False)
        placed.append(Segment(place_matrix(m, matrix), len(matrix), int(start), at, scale))
    table, n_blocks = segments(launch, placed)
    y = m.place(np.full(expected.shape, UNTOUCHED))
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, n)
    m.launch(
        linear(fmt, launch),
        (n_blocks, N_TOKENS),
        {
            "records": m.place(records, writable=False),
            "segments": m.place(table, writable=False),
            "table": place_table(m, fmt),
            "y": y,
            "count": m.place(np.array([N_COUNTED], np.uint32), writable=False),
            "n": n,
            "n_segments": len(rows),
            "y_stride": expected.shape[1],
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
            "late": len(rows) % 2,
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    return Outcome(m.read(y, np.float32, expected.shape), expected)


def cases() -> Iterator[Case]:
    """Small shapes for the catalog's variants; real ones for the best team."""
    for launch, fmt in launches():
        for n, rows in small(fmt):
            width = -(-n // PAIRED_VALUES) * PAIRED_VALUES if launch.paired else n
            yield _case(fmt, launch, width, rows)
    for name in GPU_FORMATS:
        fmt = FORMATS[name]
        for n, rows in LARGE_FLOAT if is_float(fmt) else LARGE:
            yield _case(fmt, best_launch(fmt, n), n, rows, large=True)
    for launch, fmt in launches():
        if launch.paired:
            yield _case(fmt, launch, 5120, (4096, 512), large=True)
        elif launch.eager:
            yield _case(fmt, launch, 10240, (320,), large=True)


def _case(
    fmt: BlockFormat, launch: RowLaunch, n: int, rows: tuple[int, ...], *, large: bool = False
) -> Case:
    name = f"{' and '.join(map(str, rows))} rows of {n}"
    return Case(name, linear(fmt, launch), partial(run_linear, fmt, launch, n, rows), large)
