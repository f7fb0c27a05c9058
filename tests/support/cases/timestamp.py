"""timestamp: it writes its own place and no other, and no time is before an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.gpu.timestamp import STAMP_BYTES, timestamp, timestamp_reference
from tests.support.cases.case import Case, Outcome
from tests.support.machines import Machine

N_PLACES = 5
NEVER = 2**64 - 1
"""No clock shows it."""


def run_timestamp(indices: tuple[int, ...], overlapped: bool, machine: Machine) -> Outcome:
    """The places that changed, then whether every launch's time follows the one before."""
    stamps = np.full(N_PLACES, NEVER, np.uint64)
    target = machine.place(stamps)
    for index in indices:
        machine.launch(
            timestamp(overlapped=overlapped), (1,), {"target": target + STAMP_BYTES * index}
        )
    times = machine.read(target, np.uint64, N_PLACES)
    ordered = np.diff(times[list(indices)].astype(np.float64)) >= 0
    expected = np.any([timestamp_reference(stamps, index) for index in indices], axis=0)
    return Outcome(
        np.concatenate([times != NEVER, ordered]),
        np.concatenate([expected, np.ones(len(indices) - 1, np.bool_)]),
    )


def cases() -> Iterator[Case]:
    """One place, and several in an order of their own."""
    for name, indices in {"one place": (2,), "three places": (4, 0, 1)}.items():
        for overlapped in (False, True):
            run = partial(run_timestamp, indices, overlapped)
            yield Case(name, timestamp(overlapped=overlapped), run)
