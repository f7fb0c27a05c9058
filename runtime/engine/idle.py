"""What a step loop does while it has nothing to do."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from runtime.engine.executor import Executor

PAUSE_SECONDS = 0.05
"""Of rest before every piece of work: a request that follows another one at once waits for none."""


class Preparation(Protocol):
    """Work that makes later steps quicker, in pieces of tens of milliseconds."""

    async def next(self) -> bool:
        """Do a piece of it; False: it was the last one."""
        ...


@runtime_checkable
class PreparingExecutor(Executor, Protocol):
    """An executor that can prepare for steps that have not been asked for yet."""

    @property
    def warm_up(self) -> Preparation:
        """To be worked at between steps only."""
        ...


class Idler:
    """Waits for a step loop, and lets its executor prepare meanwhile."""

    def __init__(self, executor: Executor) -> None:
        self._left = executor.warm_up if isinstance(executor, PreparingExecutor) else None

    async def until(self, wake: asyncio.Event) -> None:
        """Returns once `wake` is set and the piece of work that was begun is done."""
        while self._left is not None:
            try:
                async with asyncio.timeout(PAUSE_SECONDS):
                    await wake.wait()
                return
            except TimeoutError:
                if not await self._left.next():
                    self._left = None
        await wake.wait()
