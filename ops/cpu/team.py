"""Team: long-lived worker threads that walk programs, the only process-wide object.

Each worker is a Python thread inside one compiled function that holds no GIL; workers of a team
that takes the machine are pinned to cores (`cores.pin_to`).  Engines share the team:
`acquire_team` counts references.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from types import TracebackType
from typing import Self

import numpy as np

from ops.cpu import cores, walk
from ops.cpu.c_functions import c_function
from ops.cpu.program import Program, address_of, aligned

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}


class TeamError(RuntimeError):
    """The worker team cannot be had, or not used, as asked."""


class Team:
    """Workers that run programs in the order of submission; made by `acquire_team`."""

    def __init__(self, n_threads: int, cpus: list[int] | None) -> None:
        self.n_threads = n_threads
        self.cpus = cpus
        self._process = os.getpid()
        self._submitting = threading.Lock()
        self._control = aligned(walk.CONTROL_BYTES // 8, np.int64)
        self._address = address_of(self._control)
        self._set_constants()
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"worker-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, program: Program) -> None:
        """Queue `program` and return at once; its event becomes readable when it has ended.

        Raises: TeamError in a forked child, when the program is running, or after the close.
        """
        if os.getpid() != self._process:
            raise TeamError(
                "the worker threads stayed in the parent process: open the engine after the fork"
            )
        with self._submitting:
            if not self._threads:
                raise TeamError("the worker team is closed")
            if program.running:
                raise TeamError("the program is running already")
            if not walk.submit(self._address, program.address):
                raise TeamError(f"{walk.RING_SLOTS} programs are waiting already")

    def run(self, program: Program) -> None:
        """Submit `program` and block until it has ended (for tests and benchmarks)."""
        self.submit(program)
        program.wait()

    @property
    def pulse(self) -> tuple[int, ...]:
        """Numbers of which one changes whenever a worker takes or ends a piece of work."""
        return tuple(int(self._control[at // 8]) for at in (walk.CLAIM, walk.N_DONE, walk.HEAD))

    @property
    def n_asleep(self) -> int:
        """Workers that wait without using a processor."""
        return int(self._control[walk.SLEEPING // 8])

    def release(self) -> None:
        """Give back one `acquire_team`; the last one ends the threads."""
        _SHARED.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def end(self) -> None:
        """Let the threads return, and wait for them."""
        with self._submitting:
            threads, self._threads = self._threads, []
        walk.stop(self._address)
        for thread in threads:
            thread.join()

    def _work(self, worker: int) -> None:
        if self.cpus is not None and hasattr(os, "sched_setaffinity"):
            try:
                os.sched_setaffinity(0, {self.cpus[worker]})
            except OSError:
                self.cpus = None  # a container may forbid it: the workers float
        walk.work(self._address, worker)

    def _set_constants(self) -> None:
        for offset, name in (
            (walk.SYSCALL, "syscall"),
            (walk.WRITE, "write"),
            (walk.USLEEP, "usleep"),
            (walk.YIELD, "sched_yield"),
        ):
            self._control[offset // 8] = c_function(name)
        futex = FUTEX_NUMBERS.get(platform.machine(), 0) if sys.platform == "linux" else 0
        self._control[walk.FUTEX // 8] = futex
        self._control[walk.N_WORKERS // 8] = self.n_threads


class _SharedTeam:
    """The team of this process and how many hold it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._team: Team | None = None
        self._n_holders = 0
        self._process = os.getpid()

    def acquire(self, n_threads: int | None, spare: int) -> Team:
        with self._lock:
            if self._process != os.getpid():
                # A fork copied the record but not the threads: this process starts its own.
                self._team, self._n_holders, self._process = None, 0, os.getpid()
            if self._team is None:
                n_started = n_threads or max(cores.default_threads() - spare, 1)
                self._team = Team(n_started, cores.pin_to(n_started))
            elif n_threads is not None and n_threads > self._team.n_threads:
                raise TeamError(
                    f"a team of {self._team.n_threads} workers is in use, {n_threads} were asked "
                    "for: open the engine with the most threads first, or close the others"
                )
            self._n_holders += 1
            return self._team

    def release(self, team: Team) -> None:
        with self._lock:
            if team is not self._team:
                raise TeamError("the team was released more often than acquired")
            self._n_holders -= 1
            if self._n_holders == 0:
                self._team = None
                team.end()


_SHARED = _SharedTeam()


def acquire_team(n_threads: int | None = None, *, spare: int = 0) -> Team:
    """The process's team, started if nobody holds it; give it back with `release`.

    n_threads: workers wanted, None for whatever runs or else one per physical core but `spare`.  A
    running team of more workers serves too.

    Raises: TeamError for less than one worker, or when a running team has fewer than asked for.
    """
    if n_threads is not None and n_threads < 1:
        raise TeamError(f"n_threads = {n_threads}: use at least 1")
    return _SHARED.acquire(n_threads, spare)
