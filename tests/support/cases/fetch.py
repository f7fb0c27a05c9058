"""fetch_experts: experts that are not on the GPU are copied there, the others stay."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.fetch import GRID, FetchLayout, fetch_experts, fetched_reference
from tests.support.cases.case import Case, Outcome
from tests.support.machines import Machine

LEAD = 48
"""Bytes in front of the first matrix in its pages."""

SMALL = {"tiny": ((80, 33, 64), 3), "5": ((36881, 40976, 32848), 5)}
LARGE = ((884_736, 884_736, 1_290_240), 16)


def run(matrix_bytes: tuple[int, int, int], n_expert: int, grid: int, m: Machine) -> Outcome:
    """The table, then every copied matrix, as bytes."""
    rng = np.random.default_rng(6)
    layout = FetchLayout.of(matrix_bytes)
    stacks = [
        rng.integers(0, 256, LEAD + n_expert * (n + 5) + 16).astype(np.uint8) for n in matrix_bytes
    ]
    hosts = [m.place(stack, writable=False) + LEAD for stack in stacks]
    strides = [n + 5 for n in matrix_bytes]
    addresses = [
        np.uint64(host) + np.arange(n_expert, dtype=np.uint64) * np.uint64(stride)
        for host, stride in zip(hosts, strides, strict=True)
    ]
    table = np.zeros((n_expert, 4), np.uint64)
    table[1::3] = rng.integers(1, 1 << 40, (len(table[1::3]), 4))
    buffer = m.place(np.zeros(n_expert * layout.pitch, np.uint8))
    fetched = m.place(np.zeros((n_expert, 4), np.uint64))
    arguments = {
        "table": m.place(table, writable=False),
        "n_expert": n_expert,
        "buffer": buffer,
        "place_1": layout.places[1],
        "place_2": layout.places[2],
        "pitch": layout.pitch,
        "fetched": fetched,
    }
    for i in range(3):
        arguments |= {f"host_{i}": hosts[i], f"stride_{i}": strides[i]}
        arguments[f"bytes_{i}"] = matrix_bytes[i]
    m.launch(fetch_experts(), (grid,), arguments)

    expected = fetched_reference(table, addresses, buffer, layout)
    copies = m.read(buffer, np.uint8, n_expert * layout.pitch)
    got, wanted = [], []
    for expert in np.flatnonzero(table[:, 0] == 0):
        for i, n in enumerate(matrix_bytes):
            at = int(expected[expert, i]) - buffer
            first = LEAD + expert * strides[i]
            got.append(copies[at : at + n])
            wanted.append(stacks[i][first : first + n])
    rows = m.read(fetched, np.uint8, 32 * n_expert)
    return Outcome(
        np.concatenate([rows, *got]), np.concatenate([expected.view(np.uint8).reshape(-1), *wanted])
    )


def cases() -> Iterator[Case]:
    """Matrices that are not multiples of a copy's pieces, at addresses that are none either."""
    for name, sizes in SMALL.items():
        yield Case(f"{name} experts, 2 blocks", fetch_experts(), partial(run, *sizes, 2))
    yield Case("16 experts of 3 MB", fetch_experts(), partial(run, *LARGE, GRID), large=True)
