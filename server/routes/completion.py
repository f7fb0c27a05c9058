"""`/completion` (llama-server's own form) and `/v1/completions` (OpenAI's)."""

from __future__ import annotations

from aiohttp import web

from server.body import read_request
from server.prompts import engine_prompt, prompt_text
from server.replies import NativeReply, TextReply
from server.requests import CompletionRequest
from server.respond import respond
from server.service import SERVICE


async def native_completion(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    limits = service.limits
    completion = await read_request(
        request, lambda body: CompletionRequest.parse_native(body, limits)
    )
    engine = service.engine
    prompts = [await engine_prompt(engine, prompt) for prompt in completion.prompts]
    texts = [await prompt_text(engine, prompt) for prompt in completion.prompts]
    reply = NativeReply(service.model_name, completion.wishes, texts)
    return await respond(request, service, prompts, completion.wishes, reply)


async def text_completions(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    limits = service.limits
    completion = await read_request(
        request, lambda body: CompletionRequest.parse_openai(body, limits)
    )
    prompts = [await engine_prompt(service.engine, prompt) for prompt in completion.prompts]
    reply = TextReply(service.model_name, completion.wishes)
    return await respond(request, service, prompts, completion.wishes, reply)
