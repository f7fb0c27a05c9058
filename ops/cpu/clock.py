"""Times inside a program: a job that keeps the processor's cycle counter, and adds up what passed.

It has one chunk, so whichever worker ended the job before it runs it on the way: 20 ns, no barrier.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ops.cpu.cycles import cycle_counter
from ops.cpu.job import args_record, job_kernel, record
from ops.cpu.memory import array, load_i64, store_i64
from ops.cpu.program import Program, address_of, aligned

CLOCK = args_record("clock", at="i8", last="i8", total="i8")
"""at     i64 that gets the counter
last   i64 of the time before;  total  i64 that the cycles since then are added to; 0: neither
"""


@job_kernel
def clock(args: int, chunk: int, worker: int) -> None:
    """Keep the time."""
    a = array(args, 1, CLOCK)[0]
    now = cycle_counter()
    store_i64(a.at, now)
    if a.total != 0:
        store_i64(a.total, load_i64(a.total) + now - load_i64(a.last))


@njit("int64()", cache=True)  # keeps the GIL: giving it up could cost 5 ms
def cycles():
    """The counter now."""
    return cycle_counter()


class CycleClock:
    """Turns cycle counts into seconds of `time.perf_counter`, better the longer it exists."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), int(cycles())

    def lengths(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of so many cycles."""
        began, first = self._began
        rate = max(int(cycles()) - first, 1) / (time.perf_counter() - began)
        result: NDArray[np.float64] = counts.astype(np.float64) / rate
        return result

    def seconds(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """When the counter showed these."""
        now, count = time.perf_counter(), int(cycles())
        return now - self.lengths(count - counts)


def add_clock(program: Program, at: int, *, last: int = 0, total: int = 0) -> None:
    """Have the program keep the time here; see `CLOCK`."""
    program.add("clock", clock.address, record(CLOCK, at=at, last=last, total=total))


class ClockedProgram(Program):
    """A program that keeps the time before its first job and after each one.

    clocked  names of the jobs whose ends are kept;  times i64[capacity + 1] the counter at the
             start and at each of those ends
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(2 * capacity + 1)
        self.times = aligned(capacity + 1, np.int64)
        self.clocked: list[str] = []

    def add(self, name: str, function: int, args: NDArray[Any] | None, n_chunks: int = 1) -> int:
        if not self.clocked:
            self._add_clock()
        index = super().add(name, function, args, n_chunks)
        self.clocked.append(name)
        self._add_clock()
        return index

    def _add_clock(self) -> None:
        args = record(CLOCK, at=address_of(self.times) + 8 * len(self.clocked))
        super().add("clock", clock.address, args)
