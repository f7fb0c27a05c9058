"""The kernels of residual streams: each way to return and to enter, each form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu import streams as kernels
from ops.gpu.streams import (
    BLOCKS,
    N_MIX,
    N_RETURNS,
    N_STREAM,
    block_of,
    enter_reference,
    enter_streams,
    gated_mean,
    gated_mean_grid,
    gated_mean_reference,
    sinkhorn_input,
    sinkhorn_reference,
)
from ops.quants.block import F32, U8, ActivationKind
from tests.support.cases.block_output import BlockOutput
from tests.support.cases.case import Array, Case, Outcome, given, normal_of
from tests.support.machines import Machine

TOLERANCE = 2e-5
EPS = 1e-6

Kinds = tuple[ActivationKind, ...]


@dataclass(frozen=True)
class Entering:
    """k: routed experts of the last block, beside a shared one; 0: a delta alone.

    gather  row r is the streams of token rows - 1 - r
    """

    n: int
    returning: int
    kind: int
    k: int = 0
    delta: bool = True
    gather: bool = False
    kinds: Kinds = ("f32",)
    rows: int = 2

    def __str__(self) -> str:
        return f"{self.n}, returning {self.returning}, kind {self.kind}, {', '.join(self.kinds)}"


SMALL = (
    Entering(256, kernels.RETURN_TO_ALL, kernels.ENTER_GATED, kinds=("f32", "q8_256", "q8_32")),
    Entering(64, kernels.RETURN_GATED, kernels.ENTER_GATED, kinds=("f32", "q8_32")),
    Entering(64, kernels.RETURN_MIXED, kernels.ENTER_MIXED, k=8),
    Entering(64, kernels.RETURN_GATED, kernels.ENTER_GATED, k=5, delta=False, kinds=("q8_32",)),
    Entering(288, kernels.RETURN_NOTHING, kernels.ENTER_MEAN, gather=True),
    Entering(32, kernels.RETURN_MIXED, kernels.ENTER_NOTHING, kinds=()),
)
LARGE = (
    Entering(
        2560, kernels.RETURN_GATED, kernels.ENTER_GATED, k=10, delta=False, kinds=("f32", "q8_256")
    ),
    Entering(4096, kernels.RETURN_MIXED, kernels.ENTER_MIXED, k=8, delta=False, rows=31),
    Entering(4096, kernels.RETURN_NOTHING, kernels.ENTER_MEAN, kinds=("f32", "q8_256")),
)
SINKHORN_SMALL: tuple[tuple[int, Kinds], ...] = (
    (64, ("f32", "q8_32")),
    (256, ("f32", "q8_256", "q8_32")),
    (32, ("q8_32",)),
    (64, ("f32",)),
)
MEANS: tuple[tuple[int, int, Kinds], ...] = (
    (256, 4, ("f32", "q8_256", "q8_32")),
    (1056, 1, ("q8_32",)),
    (24, 1, ("f32",)),
)


class Forms:
    """Places for rows in several forms, and whether they hold the right ones."""

    def __init__(self, m: Machine, kinds: Kinds, n_rows: int, width: int) -> None:
        self._m, self._n_rows, self._width = m, n_rows, width
        self._bytes = {kind: activation_layout(kind, width)[2] for kind in kinds}
        self._places = {
            kind: m.place(np.zeros((n_rows + 1, size), np.uint8))
            for kind, size in self._bytes.items()
        }
        self.fields = {
            f"{'out_' if kind == 'f32' else ''}{kind}": self._places.get(kind, 0)
            for kind in ("f32", "q8_256", "q8_32")
        }

    def compared(self, expected: F32) -> tuple[Array, Array]:
        """(what was written, what had to be).

        Of each form how many bytes are not those of the f32 rows, then these; where there are none,
        whether each value of the record of 32-value groups is as close as its step allows.
        """
        if not self._places:
            return np.zeros(0), np.zeros(0)
        read = {
            kind: self._m.read(at, np.uint8, (self._n_rows + 1, self._bytes[kind]))
            for kind, at in self._places.items()
        }
        if "f32" not in read:
            close = self._is_close(read["q8_32"][: self._n_rows], expected)
            return close.reshape(-1), np.ones(close.size)
        rows = read["f32"][: self._n_rows, : 4 * self._width].copy().view(np.float32)
        wrong = []
        for kind, records in read.items():
            wanted = np.zeros_like(records)
            wanted[: self._n_rows] = quantize_rows(kind, rows)
            wrong.append(float(np.count_nonzero(records != wanted)))
        none = np.zeros(len(wrong))
        return np.concatenate([wrong, rows.reshape(-1)]), np.concatenate(
            [none, expected.reshape(-1)]
        )

    def _is_close(self, records: U8, expected: F32) -> Array:
        n = self._width
        scales, _, _ = activation_layout("q8_32", n)
        steps = records[:, scales : scales + n // 8].copy().view(np.float32)
        steps = np.repeat(steps, 32, axis=1)
        values = records[:, :n].view(np.int8) * steps
        return np.abs(values - expected) <= 0.501 * steps + TOLERANCE


def run_enter(s: Entering, block: int, overlapped: bool, m: Machine) -> Outcome:
    """The streams, and the rows that enter."""
    rng = np.random.default_rng(s.n + s.k)
    normal, n, rows = normal_of(rng), s.n, s.rows
    r = normal(rows + 1, N_STREAM, n)
    output = BlockOutput.drawn(rng, rows, n, s.k, delta=s.delta)
    returns = np.pad(normal(rows, N_RETURNS), ((0, 0), (0, 4)))
    is_mean = s.kind == kernels.ENTER_MEAN
    weight = normal(n) if is_mean else normal(N_STREAM, n)
    tokens = np.arange(rows, dtype=np.int32)[::-1].copy()
    width = n if is_mean else N_STREAM * n
    forms = Forms(m, s.kinds, rows, width)
    x = m.place(r)
    m.launch(
        enter_streams(block, overlapped=overlapped),
        (rows + 1,),
        {
            "x": x,
            "n": n,
            "count": given(m, np.array([rows], np.uint32)),
            "tokens": given(m, tokens, s.gather),
            **output.fields(m),
            "returning": s.returning,
            "returns": given(m, returns),
            "returns_stride": returns.shape[1],
            "kind": s.kind,
            "weight": given(m, weight),
            **forms.fields,
            "eps": EPS,
        },
    )
    order = tokens if s.gather else np.arange(rows)
    streams, entering = enter_reference(
        r[order], output.total, s.returning, returns[:, :N_RETURNS], s.kind, weight, EPS
    )
    expected = r.copy()
    expected[order] = streams
    entered, wanted = forms.compared(entering)
    result = m.read(x, np.float32, r.shape).reshape(-1)
    return Outcome(
        np.concatenate([result, entered]), np.concatenate([expected.reshape(-1), wanted]), TOLERANCE
    )


def run_mean(n: int, n_parts: int, kinds: Kinds, overlapped: bool, m: Machine) -> Outcome:
    rng, rows = np.random.default_rng(n), 2
    x, gates = (rng.normal(size=(rows + 1, n_parts * n)).astype(np.float32) for _ in range(2))
    forms = Forms(m, kinds, rows, n)
    m.launch(
        gated_mean(overlapped=overlapped),
        gated_mean_grid(n, rows + 1),
        {
            "counts": m.place(np.array([rows], np.uint32), writable=False),
            "x": m.place(np.pad(x, ((0, 0), (0, 8))), writable=False),
            "gates": m.place(np.pad(gates, ((0, 0), (0, 4))), writable=False),
            **forms.fields,
            "x_stride": n_parts * n + 8,
            "gates_stride": n_parts * n + 4,
            "n": n,
            "n_parts": n_parts,
            "scale": 0.25,
            "gate_scale": 1.5,
        },
    )
    shape = (rows, n_parts, n)
    expected = gated_mean_reference(x[:rows].reshape(shape), gates[:rows].reshape(shape), 0.25, 1.5)
    result, wanted = forms.compared(expected)
    return Outcome(result, wanted, TOLERANCE)


def run_sinkhorn(
    n: int, kinds: Kinds, block: int, overlapped: bool, m: Machine, rows: int = 2
) -> Outcome:
    """The input, and what returns."""
    rng = np.random.default_rng(n)
    r = rng.normal(size=(rows + 1, N_STREAM, n)).astype(np.float32)
    mix, base = (rng.normal(size=(k, N_MIX)).astype(np.float32) for k in (rows + 1, 1))
    scales, weight = (rng.normal(size=k).astype(np.float32) for k in (3, n))
    forms = Forms(m, kinds, rows, n)
    returns = m.place(np.zeros((rows + 1, N_RETURNS), np.float32))
    m.launch(
        sinkhorn_input(block, overlapped=overlapped),
        (2, rows + 1),
        {
            "x": m.place(r, writable=False),
            "n": n,
            "count": m.place(np.array([rows], np.uint32), writable=False),
            "mix": m.place(mix, writable=False),
            "base": m.place(base, writable=False),
            "scales": m.place(scales, writable=False),
            "weight": m.place(weight, writable=False),
            "returns": returns,
            **forms.fields,
            "n_iterations": 3,
            "epsilon": 1e-3,
            "eps": EPS,
        },
    )
    entering, returned = sinkhorn_reference(
        r[:rows], mix[:rows], base[0], scales, weight, 3, 1e-3, EPS
    )
    result, wanted = forms.compared(entering)
    back = m.read(returns, np.float32, (rows + 1, N_RETURNS))
    expected = np.concatenate([returned, np.zeros((1, N_RETURNS), np.float32)])
    return Outcome(
        np.concatenate([result, back.reshape(-1)]),
        np.concatenate([wanted, expected.reshape(-1)]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    """The small settings in every block, alone and overlapped, and real ones."""
    for overlapped in (False, True):
        for block in BLOCKS:
            enter, mixed = (
                make(block, overlapped=overlapped) for make in (enter_streams, sinkhorn_input)
            )
            for s in SMALL:
                yield Case(str(s), enter, partial(run_enter, s, block, overlapped))
            for n, kinds in SINKHORN_SMALL:
                yield Case(
                    f"{n}, {', '.join(kinds)}",
                    mixed,
                    partial(run_sinkhorn, n, kinds, block, overlapped),
                )
        for n, n_parts, mean_kinds in MEANS:
            kernel = gated_mean(overlapped=overlapped)
            name = f"{n_parts} parts of {n}, {', '.join(mean_kinds)}"
            yield Case(name, kernel, partial(run_mean, n, n_parts, mean_kinds, overlapped))
    for s in LARGE:
        block = block_of(s.n)
        yield Case(str(s), enter_streams(block), partial(run_enter, s, block, False), large=True)
    run = partial(run_sinkhorn, 4096, ("f32", "q8_256"), 512, False, rows=31)
    yield Case("31 rows of 4096", sinkhorn_input(512), run, large=True)
