"""Server-sent events: framing, keep-alive comments, and errors before and after the first byte.

Until the first result has come a failure is an ordinary HTTP error; later ones are an event of the
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from server.errors import describe
from server.generation import Event, Events, Signal

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PING = b":\n\n"
DONE = b"data: [DONE]\n\n"


def frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream:
    """Writes one stream; a client that takes nothing for `write_timeout` seconds loses it."""

    def __init__(self, request: web.Request, *, write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self.response = web.StreamResponse(headers=HEADERS)

    async def write(self, data: bytes) -> None:
        """Raises: ConnectionError when the client has left or no longer reads."""
        try:
            async with asyncio.timeout(self._timeout):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from error

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def end(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response


async def stream(
    request: web.Request,
    events: Events,
    render: Callable[[Event], Iterable[object]],
    last: Callable[[], Iterable[object]],
    *,
    done: bool,
    ping_interval: float | None,
    write_timeout: float,
) -> web.StreamResponse:
    """Send what `render` makes of each event, then `last()`; `done` adds OpenAI's `[DONE]`.

    ping_interval  seconds of silence before a comment; None or below 0: never
    Raises: whatever ended the generation before anything was sent.
    """
    wait = ping_interval if ping_interval is not None and ping_interval > 0 else None
    out = EventStream(request, write_timeout=write_timeout)
    try:
        await _send_all(out, events, render, last, wait)
        if done:
            await out.write(DONE)
    except ConnectionError:
        return out.response  # the client has left; there is nobody to tell
    except Exception as error:
        if not out.has_begun:
            raise
        return await _end_with_error(out, error)
    return await out.end()


async def _send_all(
    out: EventStream,
    events: Events,
    render: Callable[[Event], Iterable[object]],
    last: Callable[[], Iterable[object]],
    wait: float | None,
) -> None:
    while (event := await events.next(wait)) is not Signal.END:
        if isinstance(event, Signal):
            data = PING
        else:
            data = b"".join(frame(value) for value in render(event))
        if data:
            await out.write(data)
    data = b"".join(frame(value) for value in last())
    if data:
        await out.write(data)


async def _end_with_error(out: EventStream, error: Exception) -> web.StreamResponse:
    try:
        await out.write(frame({"error": describe(error)[1]}))
        return await out.end()
    except ConnectionError:
        return out.response
