"""From what a request holds to what the engine takes: texts, token ids, rendered chats."""

from __future__ import annotations

import asyncio

from runtime import Engine
from runtime.text.chat_template import GUARD
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
    """The chat as the model's template writes it, contents guarded; off the loop, templates may be
    slow.

    Raises: TemplateError, RequestError.
    """
    template = service.chat_template
    variables = {**service.settings.chat_template_kwargs, **chat.template_kwargs}

    def render() -> str:
        return template.render(
            chat.messages,
            chat.tools,
            chat.add_generation_prompt,
            chat.continue_final_message,
            **variables,
        )

    return await asyncio.to_thread(render)


async def chat_ids(service: Service, chat: ChatRequest) -> list[int]:
    """The token ids of a chat; a BOS that the template wrote itself is not doubled."""
    text = await render_chat(service, chat)
    return await service.engine.tokenize(text, parse_special=True, guard=GUARD)


async def _ids(engine: Engine, prompt: list[str | int]) -> list[int]:
    ids: list[int] = []
    for number, part in enumerate(prompt):
        if isinstance(part, str):
            ids += await engine.tokenize(part, add_special=number == 0, parse_special=True)
        else:
            ids.append(part)
    return ids
