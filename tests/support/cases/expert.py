"""The expert kernels against `ops.arithmetic`: three experts in four slots of two tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.expert import (
    ADDRESSES,
    GPU_FORMATS,
    TEAMS,
    RowLaunch,
    best_team,
    down_reference,
    expert_down,
    expert_gate_up,
    gate_up_reference,
)
from ops.gpu.kernel import format_table
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32
from tests.support.blocks import random_rows
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine

UNTOUCHED = np.float32(7.5)
"""What lies in a result before the launch; slot 1 has no expert and keeps it."""

SMALL = [(2560, 7), (768, 131)]
"""(n, n_rows): more than a chunk with a rest, less than a chunk; both with rows left over."""

LARGE = [(2048, 768), (768, 2048), (4096, 1536), (1536, 4096), (5120, 17408)]

SLOTS = ((0, 0), (2, 1), (3, 2))
"""(slot, expert); slot s belongs to token s // 2."""


def activations(n_rows: int, n: int, seed: int) -> F32:
    """f32[n_rows, n]: plain values, then a zero group, ties, a tiny and a huge group."""
    x = np.random.default_rng(seed).normal(size=(n_rows, n)).astype(np.float32)
    x[0, :256] = 0
    x[-1, :32] = np.arange(32, dtype=np.float32) - 15.5
    x[-1, 31] = 127
    x[-1, 256:512] *= np.float32(1e-31)
    x[0, 512:] *= np.float32(1e30)
    return x


def place_matrix(machine: Machine, rows: Array) -> int:
    """The address of a matrix, its end rounded up to 16 bytes as a tensor's in a file is."""
    content = rows.reshape(-1)
    padded = np.zeros(-(-content.nbytes // 16) * 16, np.uint8)
    padded[: content.nbytes] = content
    return machine.place(padded, writable=False)


def place_table(machine: Machine, fmt: BlockFormat) -> int:
    """The address of the format's grid, 0 if it has none."""
    table = format_table(fmt)
    return machine.place(table, writable=False) if table.nbytes else 0


def run_gate_up(fmt: BlockFormat, launch: RowLaunch, n: int, n_rows: int, m: Machine) -> Outcome:
    """h f32[4, n_rows]."""
    matrices = [random_rows(fmt, n_rows, n, seed) for seed in range(6)]
    records = quantize_rows(fmt.activation, activations(2, n, seed=9))
    addresses = [place_matrix(m, matrix) for matrix in matrices]
    experts = _slots(np.array([addresses[0::2], addresses[1::2], [0, 0, 0]]).T)
    expected = np.full((4, n_rows), UNTOUCHED)
    for slot, expert in SLOTS:
        gate, up = matrices[2 * expert : 2 * expert + 2]
        token = slot // 2
        expected[slot] = gate_up_reference(fmt, gate, up, records[token : token + 1])[0]
    h = m.place(np.full((4, n_rows), UNTOUCHED))
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, n)
    m.launch(
        expert_gate_up(fmt, launch),
        launch.grid(n_rows, 4),
        {
            "records": m.place(records, writable=False),
            "experts": m.place(experts, writable=False),
            "table": place_table(m, fmt),
            "h": h,
            "n": n,
            "n_rows": n_rows,
            "n_used": 2,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    return Outcome(m.read(h, np.float32, (4, n_rows)), expected)


def run_down(fmt: BlockFormat, launch: RowLaunch, n: int, n_rows: int, m: Machine) -> Outcome:
    """y f32[4, n_rows]."""
    matrices = [random_rows(fmt, n_rows, n, seed) for seed in range(3)]
    h = activations(4, n, seed=10)
    downs = [place_matrix(m, matrix) for matrix in matrices]
    experts = _slots(np.array([[16, 16, 16], [16, 16, 16], downs]).T)
    expected = np.full((4, n_rows), UNTOUCHED)
    for slot, expert in SLOTS:
        expected[slot] = down_reference(fmt, matrices[expert], h[slot : slot + 1])[0]
    y = m.place(np.full((4, n_rows), UNTOUCHED))
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, n)
    m.launch(
        expert_down(fmt, launch),
        launch.grid(-(-n_rows // 2), 4),
        {
            "h": m.place(h, writable=False),
            "experts": m.place(experts, writable=False),
            "table": place_table(m, fmt),
            "y": y,
            "n": n,
            "n_rows": n_rows,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    return Outcome(m.read(y, np.float32, (4, n_rows)), expected)


def _slots(experts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Addresses [3, 3] of experts -> the table of four slots, the second one empty."""
    table = np.zeros((4, ADDRESSES), np.uint64)
    table[[0, 2, 3], :3] = experts
    return table


def cases() -> Iterator[Case]:
    """Small shapes for every team, alone and overlapped; real ones for the best team."""
    for name in GPU_FORMATS:
        fmt = FORMATS[name]
        for team in TEAMS:
            for overlapped in (False, True):
                # As in the catalog: the text holds the block and the blocks a multiprocessor.
                yield from _pair(fmt, SMALL, RowLaunch(team, overlapped=overlapped))
        for n, n_rows in LARGE:
            launch = RowLaunch(best_team(fmt, n))
            yield from _pair(fmt, [(n, n_rows)], launch, large=True)


def _pair(
    fmt: BlockFormat, shapes: list[tuple[int, int]], launch: RowLaunch, *, large: bool = False
) -> Iterator[Case]:
    gate_up, down = expert_gate_up(fmt, launch), expert_down(fmt, launch)
    for n, n_rows in shapes:
        shape = f"{n_rows}x{n}"
        yield Case(shape, gate_up, partial(run_gate_up, fmt, launch, n, n_rows), large)
        yield Case(shape, down, partial(run_down, fmt, launch, n, n_rows), large)
