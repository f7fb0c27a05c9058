"""Chunks of a layer's `serve` that go another way than they should."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ops.cpu.posts import TURN
from ops.cpu.serve import SERVE
from runtime.experts.serve_program import ServeProgram

JOB = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Chunk = Callable[[int, int, int], None]

FORECAST, GATE_UP, DOWN = range(3)
"""Kinds of chunks."""


def serve_record(address: int) -> Any:
    """A layer's `SERVE` record, as its job gets it."""
    return np.frombuffer((ctypes.c_uint8 * SERVE.itemsize).from_address(address), SERVE)[0]


def turn_of(args: int) -> int:
    """The number of the step that the layer is served in."""
    step = int(serve_record(args)["step"])
    return ctypes.c_int64.from_address(step + TURN).value


def kind_of(args: int, chunk: int) -> int:
    """Which kind a chunk of a layer is."""
    record = serve_record(args)
    chunk -= int(record["n_first"])
    return FORECAST if chunk < 0 else GATE_UP if chunk < record["n_gate_up"] else DOWN


class Trouble:
    """What happened to a layer's chunks.

    n_met  how many had trouble
    then   is called beside it
    """

    def __init__(
        self, usual: Chunk, kind: int, nth: int, how: Callable[[Chunk, int, int, int], None]
    ) -> None:
        self._usual, self._kind, self._how = usual, kind, how
        self._lock = threading.Lock()
        self._services: list[int] = []
        self._nth = nth
        self.n_met = 0
        self.then: Callable[[], object] = lambda: None

    def __call__(self, args: int, chunk: int, worker: int) -> None:
        if self._meets(args, chunk):
            self.then()
            self._how(self._usual, args, chunk, worker)
        else:
            self._usual(args, chunk, worker)

    def _meets(self, args: int, chunk: int) -> bool:
        with self._lock:
            if self.n_met or kind_of(args, chunk) != self._kind:
                return False
            service = turn_of(args)
            if service not in self._services:
                self._services.append(service)
            self.n_met += len(self._services) == self._nth
            return self.n_met > 0


@contextmanager
def trouble(
    serves: Sequence[ServeProgram],
    layer: int,
    kind: int,
    how: Callable[[Chunk, int, int, int], None],
    *,
    nth: int = 1,
) -> Iterator[Trouble]:
    """Inside, the first chunk of a kind goes another way: how(usual, args, chunk, worker).

    nth: in the layer's nth service that has such a chunk
    """
    jobs = [serve.program._jobs for serve in serves]
    at = serves[0].program.names.index(f"{layer}.serve")
    function = int(jobs[0]["function"][at])
    met = Trouble(JOB(function), kind, nth, how)
    replaced = JOB(met)
    try:
        for job in jobs:
            job["function"][at] = ctypes.cast(replaced, ctypes.c_void_p).value
        yield met
    finally:
        for job in jobs:
            job["function"][at] = function


def undone(usual: Chunk, args: int, chunk: int, worker: int) -> None:
    """Nobody computes it."""
