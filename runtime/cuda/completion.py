"""Waiting for the GPU on the event loop: the loop itself looks, and nothing else wakes it.

Why no thread and no callback: whatever has to take the GIL to wake the loop (a thread that waited
in cuEventSynchronize, a host function in the stream) was measured to starve for 10 to 1000 ms
while the loop is busy, and a Python callback on the driver's thread can deadlock. A look costs
about 2 us and needs neither. An eventfd written by native code is the other sound way; the CPU
team has one for decode steps, and this file is for what the team takes no part in: uploads,
prompt chunks, start-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SPIN_SECONDS = 1e-3
"""How long to look in every turn of the loop: below the timers' resolution sleeping is no use."""

LONGEST_PAUSE_SECONDS = 4e-3


async def reached(done: Callable[[], bool]) -> None:
    """Return once `done()`, such as `Event.passed` or a look at a pinned word, is true.

    Notices within a turn of the loop in the first millisecond, then within a sixteenth of the time
    waited, at most 4 ms (and the loop's timer resolution of 1 ms). Cancelling stops the looking
    and leaves nothing behind; the GPU's work goes on.

    Raises: whatever `done` raises, DeviceLost above all.
    """
    begin = time.monotonic()
    while not done():
        waited = time.monotonic() - begin
        pause = 0.0 if waited < SPIN_SECONDS else min(waited / 16, LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(pause)
