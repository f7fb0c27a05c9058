"""`/health`: 200 once requests can be answered, before that 503 with the phase; needs no key."""

from __future__ import annotations

from aiohttp import web

from server.body import json_response
from server.errors import Unavailable, describe
from server.service import SERVICE


async def health(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    if service.is_ready:
        return json_response({"status": "ok"})
    if service.closing.is_set():
        status, error = describe(Unavailable("closing"))
        return json_response({"error": error}, status=status)
    status, error = describe(Unavailable("Loading model"))
    state = service.progress.state
    loading = {
        "phase": state.phase,
        "done": state.done,
        "total": state.total,
        "unit": state.unit,
        "seconds": round(state.seconds, 3),
    }
    return json_response({"error": error, "status": "loading", "loading": loading}, status=status)
