"""ServeTimes: how long the CPU team computes missed experts, and how long it waits for the GPU.

The program keeps the times itself, two a layer, which takes it 40 ns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.cpu.clock import CycleClock, add_clock
from ops.cpu.program import Program, address_of, aligned


class ServeTimes:
    """Those of one program; `begin`, then `posted` and `served` for every layer, add its clocks."""

    def __init__(self, n_layers: int) -> None:
        self._times = aligned((n_layers + 1, 2), np.int64)
        self._totals = aligned(2, np.int64)  # cycles of waiting and of serving in all runs

    def begin(self, program: Program) -> None:
        add_clock(program, self._at(0, 1))

    def posted(self, program: Program, layer: int) -> None:
        """Behind the job that waits for the layer."""
        self._add(program, layer + 1, 0)

    def served(self, program: Program, layer: int) -> None:
        """Behind the job that computes."""
        self._add(program, layer + 1, 1)

    def layers(self, clock: CycleClock) -> NDArray[np.float64]:
        """f64[n_layers, 2] of the run that ended last: when each layer's post was seen and when its
        last answer was there, in seconds of the host's clock."""
        return clock.seconds(self._times[1:])

    def totals(self, clock: CycleClock) -> tuple[float, float]:
        """Seconds of all runs: waiting, serving."""
        waiting, serving = clock.lengths(self._totals).tolist()
        return waiting, serving

    def _add(self, program: Program, row: int, column: int) -> None:
        last = self._at(row, 0) if column else self._at(row - 1, 1)
        total = address_of(self._totals) + 8 * column
        add_clock(program, self._at(row, column), last=last, total=total)

    def _at(self, row: int, column: int) -> int:
        return address_of(self._times) + 8 * (2 * row + column)
