"""`/v1/chat/completions`, and `/apply-template`, which only shows the prompt a chat becomes."""

from __future__ import annotations

from aiohttp import web

from runtime.text.chat_template import without_guard
from server.body import json_response, read_request
from server.prompts import chat_ids, render_chat
from server.replies import ChatReply
from server.requests import ChatRequest
from server.respond import respond
from server.service import SERVICE, Service


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    chat = await _parse(request, service)
    prompt = await chat_ids(service, chat)
    reply = ChatReply(service.model_name, chat.wishes)
    return await respond(request, service, [prompt], chat.wishes, reply)


async def apply_template(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    chat = await _parse(request, service)
    text = await render_chat(service, chat)
    return json_response({"prompt": without_guard(text)})


async def _parse(request: web.Request, service: Service) -> ChatRequest:
    limits = service.limits
    prefill = service.settings.prefill_assistant
    return await read_request(
        request, lambda body: ChatRequest.parse(body, limits, prefill=prefill)
    )
