"""The routes table: every path with its methods, in the order of docs/server.md."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from server.routes import chat, completion, health, metrics, models, props, slots, tokens


@dataclass(frozen=True)
class Route:
    method: str
    paths: tuple[str, ...]
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]


ROUTES: tuple[Route, ...] = (
    Route("GET", ("/health", "/v1/health"), health.health),
    Route("GET", ("/v1/models", "/models"), models.models),
    Route("POST", ("/v1/chat/completions", "/chat/completions"), chat.chat_completions),
    Route("POST", ("/v1/completions",), completion.text_completions),
    Route("POST", ("/completion", "/completions"), completion.native_completion),
    Route("POST", ("/tokenize",), tokens.tokenize),
    Route("POST", ("/detokenize",), tokens.detokenize),
    Route("POST", ("/apply-template",), chat.apply_template),
    Route("GET", ("/props",), props.props),
    Route("POST", ("/props",), props.change_props),
    Route("GET", ("/slots",), slots.slots),
    Route("POST", ("/slots/{id}",), slots.slot_action),
    Route("GET", ("/metrics",), metrics.metrics),
)
