"""The kernels of gated streams: the streams, the sums over their parts, what comes of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.gpu import streams
from ops.gpu.gated_streams import (
    N_SUMS,
    gate_grid,
    gate_reference,
    gate_streams,
    gated_rows,
    gated_sum,
    rows_grid,
    rows_reference,
    sum_grid,
)
from ops.gpu.streams import N_STREAM, enter_reference, gated_mean_reference
from tests.support.cases.block_output import BlockOutput
from tests.support.cases.case import Case, Outcome, given, normal_of
from tests.support.cases.streams import EPS, TOLERANCE, Forms, Kinds
from tests.support.machines import Machine

FACTOR = np.float32(0.25)
"""Of records without the rows that they are of."""


@dataclass(frozen=True)
class Gating:
    """k: routed experts of the last block, beside a shared one; 0: a delta alone.

    gather   row r is the streams of token rows - 1 - r
    injects  what returns is asked for
    """

    n: int
    returning: int
    k: int = 0
    gather: bool = False
    injects: bool = True
    rows: int = 2

    def __str__(self) -> str:
        return f"{self.n}, returning {self.returning}, {self.k} experts"


SMALL = (
    Gating(144, streams.RETURN_TO_ALL),
    Gating(256, streams.RETURN_GATED, k=9),
    Gating(64, streams.RETURN_NOTHING, gather=True, injects=False),
)
LARGE = (
    Gating(2560, streams.RETURN_GATED, k=10, rows=3),
    Gating(4096, streams.RETURN_GATED, rows=31),
)
ROWS: tuple[tuple[int, Kinds, bool], ...] = (
    (144, ("f32",), False),
    (256, ("f32", "q8_256", "q8_32"), True),
    (3136, ("q8_32",), False),
)
SUMS: tuple[tuple[int, Kinds], ...] = (
    (288, ("q8_32",)),
    (256, ("f32", "q8_256", "q8_32")),
    (64, ("f32",)),
)


def run_gate(s: Gating, overlapped: bool, m: Machine) -> Outcome:
    """The streams, and the sums over each block's part."""
    rng = np.random.default_rng(s.n + s.k)
    normal, n, rows = normal_of(rng), s.n, s.rows
    r = normal(rows + 1, N_STREAM, n)
    output = BlockOutput.drawn(rng, rows, n, s.k)
    returns, weight = normal(rows, N_STREAM), normal(N_STREAM, n)
    inject = normal(N_STREAM, N_STREAM, n) * np.float32(n**-0.5)
    tokens = np.arange(rows, dtype=np.int32)[::-1].copy()
    grid = gate_grid(n, rows + 1)
    x, sums = m.place(r), m.place(np.zeros((rows + 1, grid[0], N_SUMS), np.float32))
    m.launch(
        gate_streams(overlapped=overlapped),
        grid,
        {
            "x": x,
            "n": n,
            "count": given(m, np.array([rows], np.uint32)),
            "tokens": given(m, tokens, s.gather),
            **output.fields(m),
            "returning": s.returning,
            "returns": given(m, returns),
            "inject": given(m, inject, s.injects),
            "weight": given(m, weight),
            "sums": sums,
        },
    )
    order = tokens if s.gather else np.arange(rows)
    kind = streams.ENTER_GATED
    changed, _ = enter_reference(r[order], output.total, s.returning, returns, kind, weight, EPS)
    expected = r.copy()
    expected[order] = changed
    wanted = np.zeros((rows + 1, grid[0], N_SUMS))
    wanted[:rows] = gate_reference(changed, inject * s.injects, weight)
    written = m.read(sums, np.float32, wanted.shape)
    result = m.read(x, np.float32, r.shape)
    size = max(1.0, float(np.abs(wanted).max()))
    return Outcome(
        np.concatenate([result.reshape(-1), written.reshape(-1) / size]),
        np.concatenate([expected.reshape(-1), wanted.reshape(-1) / size]),
        TOLERANCE,
    )


def run_rows(n: int, kinds: Kinds, gather: bool, overlapped: bool, m: Machine) -> Outcome:
    """The rows in each form, and what returns; records alone have a factor."""
    rng, rows = np.random.default_rng(n), 2
    r = rng.normal(size=(rows + 1, N_STREAM, n)).astype(np.float32)
    weight = rng.normal(size=(N_STREAM, n)).astype(np.float32)
    inject = (rng.normal(size=(N_STREAM, N_STREAM, n)) * n**-0.5).astype(np.float32)
    tokens = np.arange(rows, dtype=np.int32)[::-1].copy()
    order = tokens if gather else np.arange(rows)
    sums = gate_reference(r[order], inject, weight)
    forms = Forms(m, kinds, rows, N_STREAM * n)
    returns = m.place(np.zeros((rows + 1, N_STREAM), np.float32))
    m.launch(
        gated_rows(overlapped=overlapped),
        rows_grid(n, rows + 1),
        {
            "counts": m.place(np.array([rows], np.uint32), writable=False),
            "x": m.place(r, writable=False),
            "tokens": m.place(tokens, writable=False) if gather else 0,
            "n": n,
            "sums": m.place(sums.astype(np.float32), writable=False),
            "n_sums": sums.shape[1],
            "weight": m.place(weight, writable=False),
            "returns": returns,
            **forms.fields,
            "record_factor": 1.0 if "f32" in kinds else FACTOR,
            "eps": EPS,
        },
    )
    entering, returned = rows_reference(r[order], sums, weight, EPS)
    result, wanted = forms.compared(entering if "f32" in kinds else entering * FACTOR)
    back = m.read(returns, np.float32, (rows + 1, N_STREAM))
    expected = np.concatenate([returned, np.zeros((1, N_STREAM))])
    return Outcome(
        np.concatenate([result, back.reshape(-1)]),
        np.concatenate([wanted, expected.reshape(-1)]),
        TOLERANCE,
    )


def run_sum(n: int, kinds: Kinds, overlapped: bool, m: Machine) -> Outcome:
    rng, rows = np.random.default_rng(n), 2
    x, gates = (rng.normal(size=(rows + 1, N_STREAM * n)).astype(np.float32) for _ in range(2))
    forms = Forms(m, kinds, rows, n)
    m.launch(
        gated_sum(overlapped=overlapped),
        sum_grid(n, rows + 1),
        {
            "counts": m.place(np.array([rows], np.uint32), writable=False),
            "x": m.place(np.pad(x, ((0, 0), (0, 8))), writable=False),
            "gates": m.place(np.pad(gates, ((0, 0), (0, 4))), writable=False),
            **forms.fields,
            "x_stride": N_STREAM * n + 8,
            "gates_stride": N_STREAM * n + 4,
            "n": n,
            "scale": 0.25,
        },
    )
    shape = (rows, N_STREAM, n)
    expected = gated_mean_reference(x[:rows].reshape(shape), gates[:rows].reshape(shape), 0.25, 1.0)
    result, wanted = forms.compared(expected)
    return Outcome(result, wanted, TOLERANCE)


def cases() -> Iterator[Case]:
    """The small settings alone and overlapped, and real ones."""
    for overlapped in (False, True):
        gate, rows = gate_streams(overlapped=overlapped), gated_rows(overlapped=overlapped)
        for s in SMALL:
            yield Case(str(s), gate, partial(run_gate, s, overlapped))
        for n, kinds, gather in ROWS:
            run = partial(run_rows, n, kinds, gather, overlapped)
            yield Case(f"{n}, {', '.join(kinds)}", rows, run)
        for n, kinds in SUMS:
            run = partial(run_sum, n, kinds, overlapped)
            yield Case(f"{n}, {', '.join(kinds)}", gated_sum(overlapped=overlapped), run)
    for s in LARGE:
        yield Case(str(s), gate_streams(), partial(run_gate, s, False), large=True)
    kinds_large: Kinds = ("f32", "q8_256", "q8_32")
    large = partial(run_rows, 2560, kinds_large, False, False)
    yield Case("2560", gated_rows(), large, large=True)
    large = partial(run_sum, 2560, kinds_large, False)
    yield Case("2560", gated_sum(), large, large=True)
