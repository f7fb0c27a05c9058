"""From what a request holds to what the engine takes: texts, token ids, rendered chats."""

from __future__ import annotations

import asyncio
from typing import Any

from runtime import Engine
from server.requests import ChatRequest, Prompt
from server.service import Service


async def engine_prompt(engine: Engine, prompt: Prompt) -> str | list[int]:
    """`prompt` for `Engine.generate`: a text as it is, a list with the texts in it tokenized."""
    return prompt if isinstance(prompt, str) else await _ids(engine, prompt)


async def prompt_text(engine: Engine, prompt: Prompt) -> str:
    """`prompt` as text, for echoing it; ids without a tokenizer give an empty one."""
    if isinstance(prompt, str):
        return prompt
    ids = await _ids(engine, prompt)
    return str(engine.tokenizer.decode(ids, special=True)) if engine.model.has_tokenizer else ""


async def render_chat(service: Service, chat: ChatRequest) -> str:
    """The chat as the template writes it, contents guarded; off the loop, templates may be slow.

    Raises: TemplateError, RequestError.
    """
    template = service.chat_template
    return await asyncio.to_thread(template.render, chat.messages, **_options(service, chat))


async def chat_ids(service: Service, chat: ChatRequest) -> list[int]:
    """The token ids of a chat; a BOS that the template wrote itself is not doubled."""
    return await service.engine.chat_prompt(
        chat.messages, template=service.chat_template, **_options(service, chat)
    )


def _options(service: Service, chat: ChatRequest) -> dict[str, Any]:
    return {
        "enable_thinking": True,  # as llama-server, also where a template's own default is not to
        **service.settings.chat_template_kwargs,
        **chat.template_kwargs,
        "tools": chat.tools,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }


async def _ids(engine: Engine, prompt: list[str | int]) -> list[int]:
    ids: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            ids += await engine.tokenize(part, add_special=number == 0, parse_special=True)
        else:
            ids.append(part)
    return ids
