"""mix_streams and mixed_input: each way to return, more rows than blocks, each form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.gpu import streams as kernels
from ops.gpu.streams import (
    MIX_ROWS,
    MIX_SHARED_BYTES,
    MIX_VALUES,
    N_MIX,
    N_STREAM,
    N_SUMS,
    USED_SUMS,
    enter_reference,
    mix_grid,
    mix_reference,
    mix_streams,
    mixed_input,
    mixed_input_grid,
    sinkhorn_reference,
)
from tests.support.cases.block_output import BlockOutput
from tests.support.cases.case import Case, Outcome, given, normal_of
from tests.support.cases.streams import EPS, TOLERANCE, Forms, Kinds
from tests.support.machines import Machine

N_ITERATIONS, EPSILON = 3, 1e-3


@dataclass(frozen=True)
class Mixing:
    """k: routed experts of the last block, beside a shared one; 0: a delta alone."""

    n: int
    returning: int
    k: int = 0
    delta: bool = True
    rows: int = 2

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.n}, returning {self.returning}, {self.k} experts"


SMALL = (
    Mixing(64, kernels.RETURN_MIXED, k=8),
    Mixing(136, kernels.RETURN_TO_ALL),
    Mixing(72, kernels.RETURN_NOTHING),
    Mixing(32, kernels.RETURN_MIXED, k=9, delta=False, rows=MIX_ROWS + 1),
)
LARGE = (
    Mixing(4096, kernels.RETURN_MIXED, k=8, delta=False, rows=1),
    Mixing(4096, kernels.RETURN_MIXED, rows=31),
    Mixing(2560, kernels.RETURN_TO_ALL),
)
INPUTS: tuple[tuple[int, Kinds, int], ...] = (
    (64, ("f32", "q8_32"), 2),
    (4096, ("f32", "q8_256", "q8_32"), 1),
    (32, ("q8_32",), 1),
    (64, ("f32",), 1),
)


def run_mix(s: Mixing, overlapped: bool, m: Machine) -> Outcome:
    """The streams, and the sums over each block's values."""
    rng = np.random.default_rng(s.n + s.k)
    normal, n, rows = normal_of(rng), s.n, s.rows
    r = normal(rows + 1, N_STREAM, n)
    output = BlockOutput.drawn(rng, rows, n, s.k, delta=s.delta)
    mix, base, scales = normal(rows, N_MIX), normal(N_MIX), normal(3)
    matrix = normal(N_MIX, N_STREAM, n) / np.float32(np.sqrt(N_STREAM * n))
    grid = mix_grid(n, rows + 1)
    x = m.place(r)
    sums = m.place(np.zeros((rows + 1, grid[0], N_SUMS), np.float32))
    m.launch(
        mix_streams(overlapped=overlapped),
        grid,
        {
            "x": x,
            "n": n,
            "count": given(m, np.array([rows], np.uint32)),
            **output.fields(m),
            "returning": s.returning,
            "mix": given(m, mix),
            "base": given(m, base),
            "scales": given(m, scales),
            "matrix": given(m, matrix),
            "sums": sums,
            "n_iterations": N_ITERATIONS,
            "epsilon": EPSILON,
        },
        shared_bytes=MIX_SHARED_BYTES,
    )
    returns = sinkhorn_reference(
        r[:rows], mix, base, scales, np.ones(n, np.float32), N_ITERATIONS, EPSILON, EPS
    )[1]
    kind = kernels.ENTER_NOTHING
    streams, _ = enter_reference(
        r[:rows], output.total, s.returning, returns, kind, np.ones(n, np.float32), EPS
    )
    expected = np.concatenate([streams, r[rows:]])
    found = m.read(x, np.float32, r.shape)
    read = m.read(sums, np.float32, (rows + 1, grid[0], N_SUMS))
    wanted = np.zeros(read.shape)
    wanted[:rows, :, :USED_SUMS] = mix_reference(streams, matrix)
    for sizes in (read, wanted):  # the streams' products as means
        sizes[..., N_MIX:] /= MIX_VALUES
    return Outcome(
        np.concatenate([found.reshape(-1), read.reshape(-1)]),
        np.concatenate([expected.reshape(-1), wanted.reshape(-1)]),
        TOLERANCE,
    )


def run_input(n: int, kinds: Kinds, overlapped: bool, m: Machine, rows: int = 2) -> Outcome:
    """The input, and the product of the mix with the streams' norm."""
    rng = np.random.default_rng(n)
    r = rng.normal(size=(rows + 1, N_STREAM, n)).astype(np.float32)
    matrix = rng.normal(size=(N_MIX, N_STREAM, n)).astype(np.float32)
    matrix /= np.float32(np.sqrt(N_STREAM * n))
    base, scales, weight = (rng.normal(size=k).astype(np.float32) for k in (N_MIX, 3, n))
    given = mix_reference(r[:rows], matrix)
    beyond = ((0, 1), (0, 0), (0, N_SUMS - USED_SUMS))
    sums = np.pad(given, beyond, constant_values=np.nan).astype(np.float32)
    forms = Forms(m, kinds, rows, n)
    mix = m.place(np.zeros((rows + 1, N_MIX), np.float32))
    m.launch(
        mixed_input(overlapped=overlapped),
        mixed_input_grid(n, rows + 1),
        {
            "x": m.place(r, writable=False),
            "n": n,
            "count": m.place(np.array([rows], np.uint32), writable=False),
            "sums": m.place(sums, writable=False),
            "n_sums": sums.shape[1],
            "base": m.place(base, writable=False),
            "scales": m.place(scales, writable=False),
            "weight": m.place(weight, writable=False),
            "mix": mix,
            **forms.fields,
            "epsilon": EPSILON,
            "eps": EPS,
        },
    )
    flat = r[:rows].reshape(rows, -1).astype(np.float64)
    norm = flat / np.sqrt((flat * flat).mean(axis=1, keepdims=True) + EPS)
    product = (norm @ matrix.reshape(N_MIX, -1).T).astype(np.float32)
    entering, _ = sinkhorn_reference(
        r[:rows], product, base, scales, weight, N_ITERATIONS, EPSILON, EPS
    )
    result, wanted = forms.compared(entering)
    found = m.read(mix, np.float32, (rows + 1, N_MIX))
    expected = np.concatenate([product, np.zeros((1, N_MIX), np.float32)])
    return Outcome(
        np.concatenate([result, found.reshape(-1)]),
        np.concatenate([wanted, expected.reshape(-1)]),
        TOLERANCE,
    )


def cases() -> Iterator[Case]:
    """The small settings alone and overlapped, and real ones."""
    for overlapped in (False, True):
        mix, entering = (make(overlapped=overlapped) for make in (mix_streams, mixed_input))
        for s in SMALL:
            yield Case(str(s), mix, partial(run_mix, s, overlapped))
        for n, kinds, rows in INPUTS:
            run = partial(run_input, n, kinds, overlapped, rows=rows)
            yield Case(f"{rows} rows of {n}, {', '.join(kinds)}", entering, run)
    for s in LARGE:
        yield Case(str(s), mix_streams(), partial(run_mix, s, False), large=True)
    run = partial(run_input, 4096, ("f32", "q8_256"), False, rows=31)
    yield Case("31 rows of 4096", mixed_input(), run, large=True)
