"""`delta_gates`: both ways to make a decay; gates to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout
from ops.gpu.delta_gates import delta_gates, delta_gates_grid, delta_gates_reference, launches
from ops.gpu.row_launch import RowLaunch
from ops.quants import BlockFormat
from tests.support.blocks import random_rows
from tests.support.cases.case import Case, Outcome
from tests.support.cases.expert import place_matrix, place_table
from tests.support.machines import Machine

TOLERANCE = 2e-6
SMALL = ((2592, 2, 5, -5.0), (128, 3, 128, None))
"""(values a row, heads, rows of a head, floor): more than a chunk; with `MANY_ROUNDS` more rows
of a block than threads."""
MANY_ROUNDS = 5
LARGE = (128, 64, 128, -5.0)


def run(
    fmt: BlockFormat,
    launch: RowLaunch,
    shape: tuple[int, int, int, float | None],
    m: Machine,
) -> Outcome:
    """How many gates differ, then the decays."""
    n, n_heads, dim, floor = shape
    rng, n_rows = np.random.default_rng(n), n_heads * dim
    gate, decay = (random_rows(fmt, n_rows, n, seed) for seed in (5, 6))
    narrow = (rng.normal(size=(2, n)) * n**-0.5).astype(np.float32)
    bias = rng.normal(size=n_rows).astype(np.float32)
    rate = -np.exp(rng.normal(size=n_heads)).astype(np.float32)
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, n)
    gates, decays = (m.place(np.zeros(n_rows, np.float32)) for _ in range(2))
    m.launch(
        delta_gates(fmt, launch),
        delta_gates_grid(launch, n_rows),
        {
            "narrow": m.place(narrow, writable=False),
            "gate_matrix": place_matrix(m, gate),
            "decay_matrix": place_matrix(m, decay),
            "table": place_table(m, fmt),
            "gates": gates,
            "decay": decays,
            "decay_bias": m.place(bias, writable=False),
            "decay_rate": m.place(rate, writable=False),
            "dim": dim,
            "has_floor": floor is not None,
            "decay_floor": floor or 0.0,
            "n": n,
            "n_rows": n_rows,
            "rounds": launch.rounds,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    found = [m.read(at, np.float32, n_rows) for at in (gates, decays)]
    expected = delta_gates_reference(fmt, gate, decay, narrow, bias, rate, floor)
    wrong = np.count_nonzero(found[0].view(np.uint32) != expected[0].view(np.uint32))
    return Outcome(
        np.concatenate([[float(wrong)], found[1]]),
        np.concatenate([[0.0], expected[1]]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    """The small shapes for every kernel that ships, and a real one."""
    for launch, fmt in launches():
        for shapes, large in ((SMALL, False), ((LARGE,), True)):
            for shape in shapes:
                n, n_heads, dim, floor = shape
                name = f"{n_heads} heads of {dim}x{n}, floor {floor}"
                kernel = delta_gates(fmt, launch)
                rounds = launch if large else replace(launch, rounds=MANY_ROUNDS)
                yield Case(name, kernel, partial(run, fmt, rounds, shape), large)
