"""StepEnds: how the loop learns that steps of a GPU have ended, and how long it waits for that."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from runtime.cuda.completion import reached
from runtime.engine.gpu.flight import Flight
from runtime.engine.gpu.gpu_parts import Exchange, GPUParts
from runtime.errors import DeviceStalled, EngineBug

STALLED_SECONDS = 4.0
"""Without an end this long after the expected one, a step counts as stalled.  More than the GPU's
own patience with the CPU: the step it gives up on ends."""

UNKNOWN_SECONDS = 30.0
"""How long the first step of a shape may take."""
LATE_WORKER_SECONDS = 30.0
"""How long the CPU's workers may take after the GPU has ended a step without them."""
SOON = 1e-6
"""Seconds, where a step ought to have ended already."""


class StepEnds:
    """The ends of an executor's steps, in the order in which they were launched."""

    def __init__(self, parts: GPUParts) -> None:
        self._parts = parts

    def of(self, epoch: int) -> Callable[[], bool]:
        """Whether all who take part in a step have ended it."""
        parts, done = self._parts, self._parts.results.done
        others = [party.ended for party in (parts.exchange, parts.memories) if party is not None]

        def ended() -> bool:
            return has_reached(int(done[0]), epoch) and all(has(epoch) for has in others)

        if (links := parts.links) is None:
            return ended
        return lambda: links.ended(epoch) and ended()  # each look is a sign of life

    async def until(self, first: Flight, last: Flight) -> None:
        """Wait for the first step in flight; `last` is the one that was launched last.

        Raises: DeviceStalled, DeviceLost; EngineBug where the GPU is idle and a step has no end.
        """
        usual, done = first.captured.seconds, self._parts.results.done
        rest = max(usual - (time.perf_counter() - first.began), SOON) if usual else 0.0
        limit = STALLED_SECONDS + (10 * usual or UNKNOWN_SECONDS)
        wait = partial(reached, self.of(first.epoch), check=partial(self._check_device, last))
        while_at_work = partial(wait, expected=rest, limit=limit)
        if not await patiently(
            while_at_work, lambda: has_reached(int(done[0]), first.epoch), self._parts.exchange
        ):  # The GPU gave up on a worker that is still at it: no other step can have the workers.
            await wait(limit=LATE_WORKER_SECONDS)

    def _check_device(self, last: Flight) -> None:
        if not self._parts.stream.idle():
            return
        if not has_reached(int(self._parts.results.done[0]), last.epoch):
            raise EngineBug("a step ended on the GPU without a report")


async def patiently(
    wait: Callable[[], Awaitable[None]], gpu_ended: Callable[[], bool], exchange: Exchange | None
) -> bool:
    """`wait` for a step's end, anew as long as the team is at work on what the GPU misses; False
    where the GPU has ended the step and the team has not.

    Raises: whatever `wait` does; DeviceStalled where nobody is at work any more.
    """
    work = 0
    while True:
        try:
            await wait()
            return True
        except DeviceStalled:
            if gpu_ended():
                return False
            before, work = work, 0 if exchange is None else exchange.at_work
            if work in (0, before):
                raise


def has_reached(done: int, epoch: int) -> bool:
    """Whether the step `epoch` is at or before the step `done`; both wrap at 2^32."""
    return (done - epoch) & 0xFFFFFFFF < 1 << 31
