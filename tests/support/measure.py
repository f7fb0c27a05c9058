"""Time and memory of one call, for tests of limits."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_SECONDS = 1.0
MAX_EXTRA_BYTES = 64 << 20
"""What refusing a hostile file may cost."""


def seconds_of_children() -> float:
    """Of the cores that the processes took which have ended and were waited for: others that keep
    the machine busy do not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass
class Cost:
    """Filled in when the block ends: seconds of this process, and the peak of bytes of Python."""

    seconds: float = 0.0
    peak_bytes: int = 0


@contextmanager
def cost() -> Iterator[Cost]:
    """Measure the block; tracing allocations makes it slower than it is, never faster."""
    measured = Cost()
    tracemalloc.start()
    started = time.process_time()
    try:
        yield measured
    finally:
        measured.seconds = time.process_time() - started
        measured.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
