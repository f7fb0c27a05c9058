"""`/metrics` in Prometheus' text form, only with `--metrics`."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from server.errors import NotSupported
from server.metrics import REGISTRY
from server.service import SERVICE


async def metrics(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    if not service.settings.metrics:
        raise NotSupported(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    return web.Response(
        body=generate_latest(request.config_dict[REGISTRY]),
        headers={
            "Content-Type": CONTENT_TYPE_PLAIN_0_0_4,
            "Process-Start-Time-Unix": str(int(service.started)),
        },
    )
