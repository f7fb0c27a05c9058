"""create_app: routes, middleware, and the engine that opens once the socket listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from runtime import EngineConfig, Progress, open_engine
from runtime.errors import EngineError
from server.body import MAX_BODY_BYTES
from server.errors import error_response
from server.routes import ROUTES
from server.routes.metrics import REGISTRY, registry
from server.security import API_PREFIX, GATE, Gate, add_cors_headers, guard
from server.service import SERVICE, Service
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

LOAD_GRACE_SECONDS = 1.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    config: EngineConfig, settings: ServerSettings, progress: Progress | None = None
) -> web.Application:
    """The application; the caller sets `app[SERVICE].listening` once its socket listens.

    Needs a running loop.  Raises: ConfigError for settings that contradict each other.
    """
    app = web.Application(middlewares=[errors_as_json, guard], client_max_size=MAX_BODY_BYTES)
    service = Service(config, settings, progress or Progress())
    app[SERVICE] = service
    app[GATE] = Gate(settings.api_keys, settings.cors_origins, settings.host)
    app[API_PREFIX] = settings.api_prefix
    app[REGISTRY] = registry(service)
    for route in ROUTES:
        for path in route.paths:
            # HEAD comes with GET: aiohttp answers it with the same headers and no body.
            app.router.add_route(route.method, settings.api_prefix + path, route.handler)
            if route.method == "GET":
                app.router.add_route("HEAD", settings.api_prefix + path, route.handler)
    app.on_response_prepare.append(add_cors_headers)
    app.on_shutdown.append(_begin_closing)
    app.cleanup_ctx.append(_engine_context)
    return app


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes OpenAI's error body; the only broad `except` of the server."""
    try:
        return await handler(request)
    except Exception as error:
        return error_response(error)


async def _begin_closing(app: web.Application) -> None:
    """Running answers get `closing_seconds` to end; see `server.generation`."""
    app[SERVICE].closing.set()


async def _engine_context(app: web.Application) -> AsyncIterator[None]:
    """The engine opens behind the listening socket and closes after the last connection."""
    service = app[SERVICE]
    closed = asyncio.Event()
    opening = asyncio.create_task(_serve_engine(service, closed), name="engine")
    yield
    closed.set()
    if not service.is_attached:
        opening.cancel()
    # A load runs on a thread that cannot be stopped: it is left behind after a moment.
    await asyncio.wait([opening], timeout=None if service.is_attached else LOAD_GRACE_SECONDS)


async def _serve_engine(service: Service, closed: asyncio.Event) -> None:
    """Open the engine and keep it until `closed`; what ends it early is `service.failed`."""
    try:
        await service.listening.wait()
        async with open_engine(service.config, service.progress) as engine:
            await service.attach(engine)
            await closed.wait()
            service.detach()
    except EngineError as error:
        _fail(service, error)
    except Exception as error:
        logger.exception("the engine ended")
        _fail(service, error)


def _fail(service: Service, error: Exception) -> None:
    service.detach()
    if not service.failed.done():
        service.failed.set_result(error)
