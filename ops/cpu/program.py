"""Program: the jobs of one step as native records that the worker team walks without Python.

A job is a C function `void job(int64 args, int64 chunk, int64 worker)` and a number of chunks.
Jobs run in order with a barrier between them; the chunks of one job run together, in any order.
A job may write the `n_chunks` of a later one (the router does); a job of 0 chunks is skipped.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.ledger import is_dry, zeros

LINE = 64
JOB = np.dtype(
    {
        "names": ["function", "args", "n_chunks"],
        "formats": ["i8"] * 3,
        "itemsize": LINE,
    }
)
N_CHUNKS_OFFSET = 16
HEADER = np.dtype(
    {
        "names": ["first_job", "end_job", "event", "one", "running", "n_finished", "error"],
        "formats": ["i8"] * 7,
        "itemsize": LINE,
    }
)
FIRST_JOB, END_JOB, EVENT, ONE, RUNNING, N_FINISHED, ERROR = (8 * i for i in range(7))


def aligned(shape: int | tuple[int, ...], dtype: Any, alignment: int = LINE) -> NDArray[Any]:
    """An array of zeros that starts at a multiple of `alignment` bytes; pages are untouched."""
    dtype = np.dtype(dtype)
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = zeros(n_bytes + alignment)
    start = -raw.ctypes.data % alignment
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def filled(shape: tuple[int, ...], values: Callable[[], NDArray[Any]]) -> NDArray[np.float32]:
    """An aligned f32 array of these values, which nobody asks for where memory is only counted."""
    made = aligned(shape, np.float32)
    if not is_dry():
        made[...] = values()
    return made


def address_of(array: NDArray[Any]) -> int:
    """Where the first element of `array` is."""
    return int(array.ctypes.data)


class Program:
    """A list of jobs, the event that says it ended, and an error word that jobs may set.

    The arrays that job arguments point to must outlive the program; `keep` holds them.
    """

    def __init__(self, capacity: int) -> None:
        self.names: list[str] = []
        self.keep: list[Any] = []
        self._jobs = aligned(capacity, JOB)
        self._header = aligned(1, HEADER)
        self._running = self._header["running"]
        self._error = self._header["error"]
        self.address = address_of(self._header)
        """Of the header; what the team is given."""
        self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        header = self._header[0]
        header["first_job"] = header["end_job"] = address_of(self._jobs)
        header["event"] = self.event
        header["one"] = 1

    def add(self, name: str, function: int, args: NDArray[Any] | None, n_chunks: int = 1) -> int:
        """Append a job; its index.  `args`: a record array whose address the function gets."""
        index = len(self.names)
        if index == len(self._jobs):
            raise ValueError(f"the program holds {index} jobs; make it with a larger capacity")
        self._jobs[index] = (function, 0 if args is None else address_of(args), n_chunks)
        if args is not None:
            self.keep.append(args)
        self.names.append(name)
        self._header[0]["end_job"] = address_of(self._jobs) + (index + 1) * LINE
        return index

    @property
    def n_chunks(self) -> NDArray[np.int64]:
        """i64[n_jobs], writable between runs."""
        return self._jobs["n_chunks"][: len(self.names)]

    def n_chunks_address(self, index: int) -> int:
        """Where a job writes the number of chunks of job `index`."""
        return address_of(self._jobs) + index * LINE + N_CHUNKS_OFFSET

    @property
    def error_address(self) -> int:
        """Where a job stores a code other than 0 when something is wrong."""
        return self.address + ERROR

    def take_error(self) -> int:
        """The error word, which is then cleared."""
        code = int(self._error[0])
        if code != 0:
            self._error[0] = 0
        return code

    @property
    def running(self) -> bool:
        """Whether the program was submitted and has not ended; its event comes a moment later."""
        return bool(self._running[0])

    def wait(self) -> None:
        """Block until the program, once submitted, has ended; takes the event."""
        while True:
            try:
                os.eventfd_read(self.event)
                return
            except BlockingIOError:
                select.select([self.event], [], [])

    def close(self) -> None:
        """Give the event back; of a submitted program it must have been taken."""
        if self.event >= 0:
            os.close(self.event)
            self.event = -1
