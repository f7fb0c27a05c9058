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

from runtime.errors import DeviceStalled

SPIN_SECONDS = 1e-3
"""The resolution of the loop's timers: below it sleeping is no use."""

LONGEST_PAUSE_SECONDS = 4e-3
PAUSE_SHARE = 1 / 16
"""Of the time waited: how long it sleeps between rare looks, unless that is shorter than timers
are: a step of 1.4 ms whose graph had never run was noticed 1.1 ms late so."""

EARLY_SHARE = 0.75
"""Of the expected time: how much of it is slept through before looking in every turn."""

LATE_SHARE = 1.5
"""Times the expected time: after that the looks become rare again."""


async def reached(
    done: Callable[[], bool],
    *,
    expected: float = 0.0,
    check: Callable[[], object] | None = None,
    limit: float | None = None,
) -> None:
    """Return once `done()`, such as `Event.passed` or a look at a pinned word, is true.

    Around the `expected` seconds (0: unknown) it looks in every turn of the loop, likewise in the
    first 16 ms of a longer wait; otherwise it notices within a sixteenth of the time waited, at
    most 4 ms (and the loop's timer resolution of 1 ms). Cancelling stops the looking and leaves
    nothing behind; the GPU's work goes on.

    check  called in the rare looks, to raise what `done` does not see, such as DeviceLost
    limit  seconds after which the wait ends

    Raises: DeviceStalled after `limit`; whatever `done` and `check` raise, DeviceLost above all.
    """
    begin = time.monotonic()
    early = EARLY_SHARE * expected - SPIN_SECONDS  # a timer may be late by its resolution
    if early > SPIN_SECONDS and not done():
        await asyncio.sleep(early)
    late = LATE_SHARE * expected + SPIN_SECONDS
    while not done():
        waited = time.monotonic() - begin
        pause = min(PAUSE_SHARE * waited, LONGEST_PAUSE_SECONDS)
        if waited < late or pause < SPIN_SECONDS:
            await asyncio.sleep(0)
            continue
        if check is not None:
            check()
        if limit is not None and waited > limit:
            raise DeviceStalled(waited)
        await asyncio.sleep(pause)
