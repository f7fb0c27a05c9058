"""BetweenSteps: work that waits until no step is in flight, such as saving a sequence's pages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from runtime.errors import EngineError

T = TypeVar("T")


class BetweenSteps:
    """wake: called when there is work; the step loop then runs it."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._jobs: deque[Callable[[], Awaitable[None]]] = deque()
        self._awaited: set[asyncio.Future[Any]] = set()

    def __bool__(self) -> bool:
        """Whether any work waits."""
        return bool(self._jobs)

    async def result_of(self, job: Callable[[], Awaitable[T]]) -> T:
        """What `job` gives, run while no step is in flight.  Raises: what it raises."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            if done.done():
                return  # nobody waits any more
            try:
                result = await job()
            except EngineError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self._awaited.add(done)
        self._jobs.append(run)
        self._wake()
        try:
            return await done
        finally:
            self._awaited.discard(done)

    async def run_all(self) -> None:
        """Run what waits, in order."""
        while self._jobs:
            await self._jobs.popleft()()

    def fail_all(self, error: EngineError) -> None:
        """Whoever waits gets `error`."""
        for waiting in self._awaited:
            if not waiting.done():
                waiting.set_exception(error)
