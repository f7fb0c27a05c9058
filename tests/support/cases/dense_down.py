"""`dense_down` against `ops.arithmetic`: two of three tokens, every activation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout
from ops.gpu.activate import ACTIVATIONS, SWIGLU_CLAMPED
from ops.gpu.dense_down import dense_down, dense_down_reference, launches
from ops.gpu.row_launch import RowLaunch
from ops.quants import BlockFormat
from tests.support.blocks import random_rows
from tests.support.cases.case import Case, Outcome
from tests.support.cases.expert import (
    LIMIT,
    UNTOUCHED,
    activations,
    place_matrix,
    place_table,
)
from tests.support.machines import Machine

SMALL = ((2560, 10, SWIGLU_CLAMPED), (768, 195, ACTIVATIONS[2]), (256, 5, ACTIVATIONS[0]))
"""(n, n_rows, activation): more than a chunk, fewer rows than teams; rows left over; short ones."""
LARGE = ((2048, 4096, SWIGLU_CLAMPED), (12288, 4096, ACTIVATIONS[0]))

N_TOKENS, N_COUNTED = 3, 2


def run(
    fmt: BlockFormat, launch: RowLaunch, n: int, n_rows: int, activation: str, m: Machine
) -> Outcome:
    """y f32[3, n_rows]; the third token is beyond the count."""
    matrix = random_rows(fmt, n_rows, n, 5)
    gate, up = (activations(N_TOKENS, n, seed) for seed in (9, 10))
    rows = np.concatenate([gate, up], axis=1)
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, n)
    y, x = m.place(np.full((N_TOKENS, n_rows), UNTOUCHED)), m.place(rows, writable=False)
    m.launch(
        dense_down(fmt, launch),
        launch.grid(-(-n_rows // 2), N_TOKENS),
        {
            "gate": x,
            "up": x + 4 * n,
            "x_stride": 2 * n,
            "matrix": place_matrix(m, matrix),
            "table": place_table(m, fmt),
            "y": y,
            "count": m.place(np.array([N_COUNTED], np.uint32), writable=False),
            "n": n,
            "n_rows": n_rows,
            "rounds": launch.rounds,
            "activation": ACTIVATIONS.index(activation),
            "limit": LIMIT,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    expected = np.full((N_TOKENS, n_rows), UNTOUCHED)
    expected[:N_COUNTED] = dense_down_reference(
        fmt, matrix, gate[:N_COUNTED], up[:N_COUNTED], activation, LIMIT
    )
    return Outcome(m.read(y, np.float32, (N_TOKENS, n_rows)), expected)


def cases() -> Iterator[Case]:
    """The small shapes for every kernel that ships, real ones for wide teams."""
    for launch, fmt in launches():
        kernel = dense_down(fmt, launch)
        for shapes, large in ((SMALL, False), (LARGE if launch.team == 32 else (), True)):
            for n, n_rows, activation in shapes:
                name = f"{n_rows}x{n}, {activation}"
                yield Case(name, kernel, partial(run, fmt, launch, n, n_rows, activation), large)
