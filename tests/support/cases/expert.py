"""The expert kernels against `ops.arithmetic`: three experts in four slots of two tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.activate import SWIGLU, SWIGLU_CLAMPED, SWIGLU_OAI
from ops.gpu.expert import (
    ACTIVATION_NUMBERS,
    ADDRESSES,
    down_reference,
    expert_down,
    expert_gate_up,
    gate_up_reference,
    launches,
)
from ops.gpu.kernel import format_table
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    RowLaunch,
    best_team,
    down_launch,
    gate_up_launch,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32
from tests.support.blocks import random_rows
from tests.support.cases.case import Array, Case, Outcome, given
from tests.support.machines import Machine

UNTOUCHED = np.float32(7.5)
"""What lies in a result before the launch; slot 1 has no expert and keeps it."""

CHOICES = (2, 0, 1, 3)
"""Numbers of the slots' experts, of `N_EXPERTS`; where the matrices lie has its own order."""
N_EXPERTS = 4


@dataclass(frozen=True)
class Experts:
    """n values a row, n_rows rows; the activation; with biases and scales of the experts."""

    n: int
    n_rows: int
    activation: str = SWIGLU
    finished: bool = False

    def __str__(self) -> str:
        name = f"{self.n_rows}x{self.n}"
        if self.activation != SWIGLU:
            name += f", {self.activation}"
        return name + (", biases and scales" if self.finished else "")


ODD_BLOCKS = 2592
"""Values of a row of an odd number of small blocks, so that rows begin anywhere."""

CLAMPED = Experts(512, 9, SWIGLU_CLAMPED)

LARGE = [
    Experts(2048, 768),
    Experts(768, 2048),
    Experts(4096, 1536),
    Experts(1536, 4096),
    Experts(5120, 17408),
]

LIMIT = 7.0

SLOTS = ((0, 0), (2, 1), (3, 2))
"""(slot, place of the expert's matrices); slot s belongs to token s // 2."""


def small(fmt: BlockFormat) -> list[Experts]:
    """More than a chunk with a rest, fewer rows than teams; less than a chunk, rows left over."""
    n = 2560 if ODD_BLOCKS % fmt.block_elems else ODD_BLOCKS
    return [Experts(n, 10), Experts(768, 195, SWIGLU_OAI, finished=True)]


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


def run_gate_up(fmt: BlockFormat, launch: RowLaunch, shape: Experts, m: Machine) -> Outcome:
    """h f32[4, n_rows]."""
    n, n_rows = shape.n, shape.n_rows
    matrices = [random_rows(fmt, n_rows, n, seed) for seed in range(6)]
    records = quantize_rows(fmt.activation, activations(2, n, seed=9))
    addresses = [place_matrix(m, matrix) for matrix in matrices]
    experts = _slots(np.array([addresses[0::2], addresses[1::2], [0, 0, 0]]).T)
    scales, biases = _finish(shape, 2)
    expected = np.full((4, n_rows), UNTOUCHED)
    for slot, place in SLOTS:
        token, expert = slot // 2, CHOICES[slot]
        finished = {"biases": biases[:, expert], "scales": scales[:, expert]}
        expected[slot] = gate_up_reference(
            fmt,
            *matrices[2 * place : 2 * place + 2],
            records[token : token + 1],
            activation=shape.activation,
            limit=LIMIT,
            **(finished if shape.finished else {}),
        )[0]
    h = m.place(np.full((4, n_rows), UNTOUCHED))
    m.launch(
        expert_gate_up(fmt, launch),
        launch.grid(n_rows, 4),
        {
            "records": m.place(records, writable=False),
            "h": h,
            "gate_scales": given(m, scales[0], shape.finished),
            "gate_biases": given(m, biases[0], shape.finished),
            "up_scales": given(m, scales[1], shape.finished),
            "up_biases": given(m, biases[1], shape.finished),
            "n_used": 2,
            "activation": ACTIVATION_NUMBERS[shape.activation],
            "limit": LIMIT,
            **_common(fmt, launch, shape, experts, m),
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    return Outcome(m.read(h, np.float32, (4, n_rows)), expected)


def run_down(fmt: BlockFormat, launch: RowLaunch, shape: Experts, m: Machine) -> Outcome:
    """y f32[4, n_rows]."""
    n, n_rows = shape.n, shape.n_rows
    matrices = [random_rows(fmt, n_rows, n, seed) for seed in range(3)]
    h = activations(4, n, seed=10)
    downs = [place_matrix(m, matrix) for matrix in matrices]
    experts = _slots(np.array([[16, 16, 16], [16, 16, 16], downs]).T)
    (scales,), (biases,) = _finish(shape, 1)
    expected = np.full((4, n_rows), UNTOUCHED)
    for slot, place in SLOTS:
        expert = CHOICES[slot]
        finished = {"bias": biases[expert], "scale": scales[expert]}
        values = h[slot : slot + 1]
        expected[slot] = down_reference(
            fmt, matrices[place], values, **(finished if shape.finished else {})
        )[0]
    y = m.place(np.full((4, n_rows), UNTOUCHED))
    m.launch(
        expert_down(fmt, launch),
        launch.grid(-(-n_rows // 2), 4),
        {
            "h": m.place(h, writable=False),
            "y": y,
            "scales": given(m, scales, shape.finished),
            "biases": given(m, biases, shape.finished),
            **_common(fmt, launch, shape, experts, m),
        },
        shared_bytes=launch.shared_bytes(fmt, n),
    )
    return Outcome(m.read(y, np.float32, (4, n_rows)), expected)


def _common(
    fmt: BlockFormat, launch: RowLaunch, shape: Experts, experts: NDArray[np.uint64], m: Machine
) -> dict[str, int]:
    """What both kernels take."""
    scales_offset, sums_offset, record_bytes = activation_layout(fmt.activation, shape.n)
    return {
        "experts": m.place(experts, writable=False),
        "table": place_table(m, fmt),
        "choices": given(m, np.array(CHOICES, np.int32), shape.finished),
        "n": shape.n,
        "n_rows": shape.n_rows,
        "rounds": launch.rounds,
        "scales_offset": scales_offset,
        "sums_offset": sums_offset,
        "record_bytes": record_bytes,
    }


def _slots(experts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Addresses [3, 3] of experts -> the table of four slots, the second one empty."""
    table = np.zeros((4, ADDRESSES), np.uint64)
    table[[0, 2, 3], :3] = experts
    return table


def _finish(shape: Experts, n_matrices: int) -> tuple[F32, F32]:
    """Scales f32[n_matrices, N_EXPERTS] and biases f32[n_matrices, N_EXPERTS, n_rows]."""
    rng = np.random.default_rng(21)
    scales = rng.uniform(0.5, 2, size=(n_matrices, N_EXPERTS)).astype(np.float32)
    biases = rng.normal(size=(n_matrices, N_EXPERTS, shape.n_rows)).astype(np.float32)
    return scales, biases


def cases() -> Iterator[Case]:
    """Small shapes for the catalog's variants; real ones for the best team.

    In small ones a team has more pairs than buffers, and the last block's has one.
    """
    for for_gate_up, for_down, fmt in launches():
        gate_up, down = replace(for_gate_up, rounds=3), replace(for_down, rounds=3)
        yield from _pair(fmt, small(fmt), gate_up, down)
    for name in BLOCK_FORMATS:
        fmt = FORMATS[name]
        for shape in LARGE:
            team = best_team(fmt, shape.n)
            yield from _pair(
                fmt, [shape], gate_up_launch(fmt, team), down_launch(fmt, team), large=True
            )
    q4_k = FORMATS["Q4_K"]
    yield from _pair(q4_k, [CLAMPED], gate_up_launch(q4_k, 32), down_launch(q4_k, 32))


def _pair(
    fmt: BlockFormat,
    shapes: list[Experts],
    for_gate_up: RowLaunch,
    for_down: RowLaunch,
    *,
    large: bool = False,
) -> Iterator[Case]:
    gate_up, down = expert_gate_up(fmt, for_gate_up), expert_down(fmt, for_down)
    for shape in shapes:
        yield Case(str(shape), gate_up, partial(run_gate_up, fmt, for_gate_up, shape), large)
        yield Case(str(shape), down, partial(run_down, fmt, for_down, shape), large)
