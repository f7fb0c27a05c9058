"""A real server on a real socket for tests: the fake device behind everything the product has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

import runtime
from server.app import create_app
from server.listen import listening
from server.service import SERVICE, Service
from server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@dataclass
class Served:
    """One running server.  `text`: what the fake model says from now on, again and again."""

    url: str
    service: Service
    session: aiohttp.ClientSession

    @property
    def engine(self) -> runtime.Engine:
        return self.service.engine

    @property
    def device(self) -> Any:
        return self.engine.executor

    def say(self, text: str) -> None:
        """Make the fake model answer `text`, then end."""
        wanted = [*text.encode(), 258]

        def next_token(tokens: list[int]) -> int | None:
            said = max(n for n in range(len(wanted)) if n == 0 or tokens[-n:] == wanted[:n])
            return wanted[said]

        self.device.next_token = next_token

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        """The stream's data, parsed; `[DONE]` as it is."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            raw = await response.text()
        return [parsed(line) for line in raw.split("\n\n") if line.startswith("data: ")]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Give the loop turns until `condition` holds (the test's timeout bounds it)."""
        while not condition():  # noqa: ASYNC110 - the product has no event for every condition
            await asyncio.sleep(0.001)

    def is_idle(self) -> bool:
        statistics = self.engine.statistics()
        return statistics.n_running == 0 and statistics.n_waiting == 0


def parsed(line: str) -> Any:
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def serving(
    config: runtime.EngineConfig | None = None, *, attach: bool = True, **settings: Any
) -> AsyncIterator[Served]:
    """A server with these ServerSettings; `attach`: wait until its engine is ready."""
    settings = {"port": 0, "closing_seconds": 0.05, "slots": True, **settings}
    own = ServerSettings(**settings)
    app = create_app(config or runtime.EngineConfig(device="fake"), own)
    async with (
        listening(app, own, greeting_seconds=0.2) as (url,),
        aiohttp.ClientSession() as session,
    ):
        served = Served(url, app[SERVICE], session)
        if attach:
            app[SERVICE].listening.set()
            await served.until(
                lambda: served.service.attached.is_set() or served.service.failed.done()
            )
            if served.service.failed.done():
                raise served.service.failed.result()
        yield served
