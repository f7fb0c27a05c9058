"""`/v1/chat/completions`, and `/apply-template`, which only shows the prompt a chat becomes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web

from runtime.notices import Reason
from runtime.text.chat_template import without_guard
from runtime.text.reply_formats import reply_format
from server.answer_parts import MakeParser, PlainParser
from server.body import json_response, read_request
from server.prompts import chat_ids, render_chat
from server.replies import ChatReply
from server.requests import ChatRequest, Wishes
from server.respond import respond
from server.service import SERVICE, Service

END_TOKENS = 8
"""Of a prompt, enough to see whether it ends inside of reasoning."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    chat = await _parse(request, service)
    prompt = await chat_ids(service, chat)
    if chat.tools and not service.chat_template.shows_tools:
        service.engine.notices.add(Reason.TOOLS_UNSEEN, "the chat template has no place for tools")
    make_parser, wishes = _reading(service, chat, prompt)
    reply = ChatReply(service.model_name, wishes, make_parser)
    return await respond(request, service, [prompt], wishes, reply)


async def apply_template(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    chat = await _parse(request, service)
    text = await render_chat(service, chat)
    return json_response({"prompt": without_guard(text)})


def _reading(service: Service, chat: ChatRequest, prompt: list[int]) -> tuple[MakeParser, Wishes]:
    """How the answers are read, and the wishes with which their markup is visible."""
    markup = reply_format(service.chat_template.source_with(chat.tools))
    reasoning = (chat.reasoning_format or service.settings.reasoning_format) != "none"
    if markup.is_plain or not (reasoning or chat.tools or markup.harmony):
        return PlainParser, chat.wishes
    prompt_end = service.engine.tokenizer.decode(prompt[-END_TOKENS:], special=True)
    said = chat.messages[-1]["content"] if chat.continue_final_message else ""
    make_parser = partial(
        markup.parser,
        prompt_end,
        chat.tools,
        reasoning=reasoning,
        said=said if isinstance(said, str) else "",
    )
    return make_parser, replace(chat.wishes, special=True)


async def _parse(request: web.Request, service: Service) -> ChatRequest:
    limits = service.limits
    prefill = service.settings.prefill_assistant
    return await read_request(
        request, lambda body: ChatRequest.parse(body, limits, prefill=prefill)
    )
