"""activate: hidden rows and their records, the bits of `ops.gpu.activate`'s reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout
from ops.gpu.activate import ACTIVATIONS, BLOCK_VALUES, KINDS, activate, activate_reference
from ops.gpu.kernel import Kernel
from ops.quants.block import F32, U8, ActivationKind
from tests.support.cases.case import Case, Outcome
from tests.support.machines import Machine

LIMIT = 7.0
PER_TOKEN = 3
SHAPES: dict[ActivationKind, tuple[int, int]] = {
    "q8_256": (1280, 2),
    "q8_32": (1056, 2),
    "f32": (88, 1),
}
"""A row and tokens of each kind; rows end within a block."""

LARGE: dict[ActivationKind, tuple[int, int]] = {
    "q8_256": (1536, 1024),
    "q8_32": (2880, 256),
    "f32": (768, 31),
}


def rows(n_rows: int, n: int) -> F32:
    """f32[n_rows, 2 n]: gate, then up; around every clamp, with infinities and NaNs."""
    x = (np.random.default_rng(n).normal(size=(n_rows, 2 * n)) * 6).astype(np.float32)
    x[0, :8] = np.array([7, 7.5, -7, -7.5, 0, -0.0, 90, -105], np.float32)
    x[0, n : n + 8] = np.array([7.5, -7.5, 7, -7, np.inf, -np.inf, 1, 1], np.float32)
    x[1, 40], x[1, n + 41], x[1, 42] = np.nan, np.nan, np.inf
    return x


def run(
    kind: ActivationKind, activation: str, n: int, tokens: int, kernel: Kernel, m: Machine
) -> Outcome:
    """Records of the tokens' rows and of one row more, which is not written, nor is the first one
    where rows are counted."""
    n_rows = tokens * PER_TOKEN
    x = rows(n_rows + 1, n)
    counted = activation != ACTIVATIONS[0]
    record_bytes = activation_layout(kind, n)[2]
    out = m.place(np.zeros((n_rows + 1, record_bytes), np.uint8))
    gate = m.place(x, writable=False)
    m.launch(
        kernel,
        (-(-n // BLOCK_VALUES), n_rows + counted),
        {
            "gate": gate,
            "up": gate + 4 * n,
            "gate_stride": 2 * n,
            "up_stride": 2 * n,
            "n": n,
            "count": m.place(np.array([tokens], np.uint32), writable=False) if counted else 0,
            "per_token": PER_TOKEN,
            "activation": ACTIVATIONS.index(activation),
            "limit": LIMIT,
            "out": out,
            "first": m.place(np.array([1], np.uint32), writable=False) if counted else 0,
        },
    )
    expected = np.zeros((n_rows + 1, record_bytes), np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected[:n_rows] = activate_reference(
            kind, activation, x[:n_rows, :n], x[:n_rows, n:], LIMIT
        )
    expected[: int(counted)] = 0
    result = m.read(out, np.uint8, expected.shape)
    return Outcome(_alike(kind, n, result), _alike(kind, n, expected))


def _alike(kind: ActivationKind, n: int, records: U8) -> U8:
    """The records with one NaN for every NaN among their floats."""
    scales, sums, _ = activation_layout(kind, n)
    floats = slice(0, 4 * n) if kind == "f32" else slice(scales, sums)
    values = np.ascontiguousarray(records[:, floats]).view(np.float32)
    values[np.isnan(values)] = np.nan
    records[:, floats] = values.view(np.uint8)
    return records


def cases() -> Iterator[Case]:
    """Every activation of every kind; a large shape of each kind."""
    for kind in KINDS:
        for overlapped in (False, True):
            kernel = activate(kind, overlapped=overlapped)
            for activation in ACTIVATIONS:
                case = partial(run, kind, activation, *SHAPES[kind], kernel)
                yield Case(activation, kernel, case)
        case = partial(run, kind, ACTIVATIONS[0], *LARGE[kind], activate(kind))
        yield Case("{} of {} tokens".format(*LARGE[kind]), activate(kind), case, large=True)
