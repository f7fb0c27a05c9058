"""Compile kernels before they are asked for, several at a time.

Numba compiles one function at a time in a process, whatever the number of its threads. So processes
of their own put what is missing into the cache on disk, from where this one loads it. A kernel is
named by where it is found: `ops.cpu.norm:norm`, `product:Q4_K`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numba

from ops.cpu.job import JobKernel

PRODUCT = "product"
LONGEST = ("attention", "general_attention", "serve", "gate_up", "route", "heads", PRODUCT)
"""What takes two seconds and more, the longest first: the others are done beside it."""
MOST_PROCESSES = 8
CHILD = "import sys; sys.path[:0] = sys.argv[2:]; from ops.cpu.compiling import main; main()"

Progress = Callable[[int, int], object]
"""Called with (kernels ready, kernels in all): none, one, two, ..."""


def name_of(kernel: JobKernel | Callable[[], object]) -> str:
    """Of a kernel, or of a function of a module that compiles something."""
    if isinstance(kernel, JobKernel):
        return f"{kernel.module}:{kernel.name}"
    return f"{kernel.__module__}:{kernel.__name__}"


def product_name(format_name: str) -> str:
    """Of the matrix product of a format."""
    return f"{PRODUCT}:{format_name}"


def prepare(name: str) -> None:
    """Compile the kernel, or load it from the cache; note that it is there.

    Raises: LookupError for a format without a kernel.
    """
    module, _, what = name.partition(":")
    if module == PRODUCT:
        from ops.cpu.matmul import matmul_address

        matmul_address(what)
    else:
        found = getattr(importlib.import_module(module), what)
        found.compile() if isinstance(found, JobKernel) else found()
    with suppress(OSError):  # it is only looked for again
        _note(name).touch()


class Preparation:
    """Kernels on their way; made by naming them, ended by `wait` or `close`."""

    def __init__(self, names: Iterable[str], n_processes: int | None = None) -> None:
        """n_processes: at once; None: as many as there are cores. Of one kernel there is none."""
        self._names = list(dict.fromkeys(names))
        missing = [name for name in self._names if not _note(name).exists()]
        self._waiting = deque(sorted(missing, key=_place))
        self._n_ready = len(self._names) - len(missing)
        self._ended: SimpleQueue[str | None] = SimpleQueue()
        cores = len(os.sched_getaffinity(0)) if n_processes is None else n_processes
        n = min(cores, len(missing), MOST_PROCESSES)
        self._children: list[subprocess.Popen[str]] = []
        self._threads = [
            threading.Thread(target=self._feed, name="compiling", daemon=True)
            for _ in range(n if n > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_kernels(self) -> int:
        return len(self._names)

    def wait(self, progress: Progress | None = None) -> None:
        """Load all of them; what no process could compile is compiled here.

        Raises: LookupError; whatever `progress` raises.
        """
        tell: Progress = progress or (lambda *_: None)
        total, n_feeding = len(self._names), len(self._threads)
        for n_ready in range(self._n_ready + 1):
            tell(n_ready, total)
        while n_feeding:
            if self._ended.get() is None:
                n_feeding -= 1
            else:
                self._n_ready += 1
                tell(self._n_ready, total)
        for index, name in enumerate(self._names):
            prepare(name)
            if index >= self._n_ready:
                tell(index + 1, total)

    def close(self) -> None:
        """Leave alone what has not been compiled."""
        self._waiting.clear()
        for child in self._children:
            child.kill()
        for thread in self._threads:
            thread.join()

    def _feed(self) -> None:
        """Have a process of its own compile one kernel after the other."""
        try:
            with suppress(OSError, IndexError, ValueError), _child() as child:
                self._children.append(child)
                if child.stdin is None or child.stdout is None:
                    return
                while True:
                    name = self._waiting.popleft()
                    child.stdin.write(f"{name}\n")
                    child.stdin.flush()
                    if child.stdout.readline().strip() != name:
                        return  # it ended, and what it could not compile says so here
                    self._ended.put(name)
        finally:
            self._ended.put(None)


def _child() -> subprocess.Popen[str]:
    """It ends with its input, so also with this process; a terminal's interrupts pass it by."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(numba.config.CACHE_DIR), *map(os.path.abspath, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _note(name: str) -> Path:
    """The file that says that a kernel is in the cache."""
    return Path(numba.config.CACHE_DIR) / f"{name.replace(':', '.')}.ready"


def _place(name: str) -> int:
    module, _, what = name.partition(":")
    key = module if module == PRODUCT else what
    return LONGEST.index(key) if key in LONGEST else len(LONGEST)


def main() -> None:
    """Compile, into the directory that is the first argument, what the lines of the input name."""
    numba.config.CACHE_DIR = sys.argv[1]
    for line in sys.stdin:
        name = line.strip()
        prepare(name)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
