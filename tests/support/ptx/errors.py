"""What can be wrong with a PTX text or with a run of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class PtxError(Exception):
    """Something the interpreter refuses; once located, its text starts with `file:line:`."""

    def __init__(self, message: str, threads: NDArray[Any] | None = None) -> None:
        super().__init__(message)
        self.threads = threads

    def locate(self, place: str, code: str, thread: str) -> None:
        """Say where it happened: source place, instruction, thread."""
        self.args = (f"{place}: {self.args[0]} in `{code}`{thread}",)


class UnknownInstruction(PtxError):
    """The text holds something the interpreter does not know."""


class UninitialisedRead(PtxError):
    """A register or memory byte is read that nothing wrote."""


class MemoryFault(PtxError):
    """An access is misaligned, outside every allocation, or a write to read-only memory."""


class Race(PtxError):
    """Two threads touch a byte of shared memory, one writing, with no barrier between."""


class Deadlock(PtxError):
    """Threads wait for one another, or for one that has left, or the run does not end."""


def culprits(threads: NDArray[Any], wrong: NDArray[np.bool_]) -> NDArray[Any]:
    """The threads whose entry of `wrong` (bool[n] or bool[n, k]) is set."""
    bad = wrong.reshape(len(threads), -1).any(axis=1)
    chosen: NDArray[Any] = threads[bad]
    return chosen
