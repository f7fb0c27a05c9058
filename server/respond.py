"""One request with prompts, wishes and a form of reply -> its answer, plain or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from server.body import json_response
from server.generation import running
from server.replies import Reply
from server.requests import Wishes
from server.service import Service
from server.sse import stream


async def respond(
    request: web.Request,
    service: Service,
    prompts: Sequence[str | list[int]],
    wishes: Wishes,
    reply: Reply,
) -> web.StreamResponse:
    """Generate and answer; a client that leaves cancels this, which frees the sequences."""
    settings = service.settings
    async with running(service, prompts, wishes) as events:
        if not wishes.stream:
            answers = await events.finish()
            if wishes.params.wants_logprobs:  # may be hundreds of entries a token
                return await asyncio.to_thread(lambda: json_response(reply.whole(answers)))
            return json_response(reply.whole(answers))
        return await stream(
            request,
            events,
            reply.pieces,
            lambda: reply.last(events.answers),
            done=reply.done,
            ping_interval=wishes.ping_interval or settings.ping_interval,
            write_timeout=settings.write_timeout,
        )
