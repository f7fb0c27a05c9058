"""Sockets: accepting connections, and letting go of them at the end.

aiohttp puts no limit on how long a new connection may take for its first request's headers, so each
one starts with a `Greeting` that waits a bounded time for a bounded number of bytes and then steps
aside for a `Connection`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from runtime.errors import ConfigError
from server.errors import CONTENT_TYPE, ApiError, Invalid, describe, error_response
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

GREETING_SECONDS = 20.0
MAX_HEADER_BYTES = 64 << 10
MAX_FIELD_BYTES = 16 << 10
MAX_HEADERS = 128
KEEPALIVE_SECONDS = 75.0
BACKLOG = 1024


class Connection(web.RequestHandler):
    """aiohttp's end of a connection with our limits; also what is not HTTP gets a JSON answer."""

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as AppRunner documents it: no log
            keepalive_timeout=KEEPALIVE_SECONDS,
            auto_decompress=False,
            max_line_size=MAX_FIELD_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_HEADERS,
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what never became a request, or failed outside of every handler.

        Raises: ConnectionError where an answer has begun.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; there is no room for an error")
        if status < 500:
            # Scanners and TLS handshakes on a plain port are common: no noise in the log.
            logger.debug("malformed HTTP: %s", message)
            response = error_response(_refusal(exc, message or ""))
        else:
            response = error_response(exc if isinstance(exc, Exception) else RuntimeError(message))
        response.headers.update({"Server": "hotexpert", "X-Content-Type-Options": "nosniff"})
        response.force_close()
        return response


class Greeting(asyncio.Protocol):
    """Holds a connection until the headers of its first request are complete."""

    def __init__(self, server: web.Server, waiting: set[Greeting], seconds: float) -> None:
        self._server = server
        self._waiting = waiting
        self._seconds = seconds
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"a stream transport is needed, not {transport!r}")
        self._transport = transport
        self._waiting.add(self)
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.close)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        # Only the end can complete the blank line: what came before has been searched.
        begin = max(len(self._received) - 3, 0)
        self._received += data
        found = (self._received.find(line, begin) for line in (b"\r\n\r\n", b"\n\n"))
        end = min((place for place in found if place >= 0), default=None)
        if (len(self._received) if end is None else end) > MAX_HEADER_BYTES:
            self._transport.write(_headers_too_large())
            self.close()
        elif end is not None:
            self._step_aside(self._transport)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()

    def close(self) -> None:
        """Drop a connection that has not asked for anything yet."""
        self._forget()
        if self._transport is not None:
            self._transport.close()

    def _step_aside(self, transport: asyncio.Transport) -> None:
        self._forget()
        handler = Connection(self._server)
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(bytes(self._received))

    def _forget(self) -> None:
        self._waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()


@asynccontextmanager
async def listening(
    app: web.Application, settings: ServerSettings, *, greeting_seconds: float = GREETING_SECONDS
) -> AsyncIterator[tuple[str, ...]]:
    """Serve `app` while the block runs; gives the addresses as URLs (or socket paths).

    Leaving stops accepting at once, lets handlers end for a moment and cancels those that do not.
    Raises: ConfigError when the address cannot be used.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request, plain ones too
        shutdown_timeout=settings.closing_seconds + 1.0,
    )
    await runner.setup()
    waiting: set[Greeting] = set()
    try:
        sockets = await _bind(runner, settings, waiting, greeting_seconds)
        try:
            yield tuple(_url(settings, name) for name in _names(sockets))
        finally:
            sockets.close()
            for greeting in list(waiting):
                greeting.close()
    finally:
        await runner.cleanup()


async def _bind(
    runner: web.AppRunner, settings: ServerSettings, waiting: set[Greeting], seconds: float
) -> asyncio.Server:
    server = runner.server
    if server is None:
        raise ConfigError("the application has no server; set it up first")

    def connection() -> Greeting:
        return Greeting(server, waiting, seconds)

    loop = asyncio.get_running_loop()
    try:
        if settings.host.endswith(".sock"):
            return await loop.create_unix_server(connection, settings.host, backlog=BACKLOG)
        return await loop.create_server(
            connection,
            settings.host.split(","),
            settings.port,
            reuse_port=settings.reuse_port or None,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another --port or --host"
        ) from error


def _refusal(error: BaseException | None, message: str) -> ApiError:
    """What aiohttp's parser refused, in our words where they would quote what was sent."""
    if isinstance(error, LineTooLong):
        return _too_large(f"the request line or a header field is over {MAX_FIELD_BYTES} bytes")
    if message == "Too many headers received":
        return _too_large(f"there are more than {MAX_HEADERS} header fields")
    reason = message.partition("\n")[0].rstrip(":")  # the lines after it quote bytes
    return Invalid(f"malformed HTTP: {reason}")


def _too_large(message: str) -> ApiError:
    return ApiError(431, "invalid_request_error", message)


def _headers_too_large() -> bytes:
    """A whole answer by hand: there is no request yet that aiohttp could answer."""
    _, error = describe(_too_large("the headers are too large"))
    body = msgspec.json.encode({"error": error})
    return (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        b"Content-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    ) % (CONTENT_TYPE.encode(), len(body), body)


def _names(server: asyncio.Server) -> list[object]:
    return [socket.getsockname() for socket in server.sockets]


def _url(settings: ServerSettings, name: object) -> str:
    if not isinstance(name, tuple):
        return str(name)
    host = f"[{name[0]}]" if ":" in str(name[0]) else str(name[0])
    return f"http://{host}:{name[1]}{settings.api_prefix}"
