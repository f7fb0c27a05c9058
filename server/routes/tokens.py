"""`/tokenize` and `/detokenize`.  Rendering long lists happens on a thread."""

from __future__ import annotations

import asyncio

from aiohttp import web

from runtime.errors import RequestError
from runtime.text.tokenizer import Tokenizer
from server.body import json_response, read_request
from server.fields import Fields
from server.requests import token_id
from server.service import SERVICE

MAX_IDS = 1_000_000


async def tokenize(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    limits, engine = service.limits, service.engine
    fields = await read_request(request, Fields)
    add_special = fields.flag("add_special")
    parse_special = fields.flag("parse_special", True)
    with_pieces = fields.flag("with_pieces")
    ids: list[int] = []
    for number, part in enumerate(_parts(fields)):
        if isinstance(part, str):
            special = add_special and number == 0
            ids += await engine.tokenize(part, add_special=special, parse_special=parse_special)
        else:
            ids.append(token_id("content", part, limits.n_vocab))
    if not with_pieces:
        return await asyncio.to_thread(json_response, {"tokens": ids})
    tokenizer = engine.tokenizer

    def render() -> web.Response:
        return json_response({"tokens": [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]})

    return await asyncio.to_thread(render)


async def detokenize(request: web.Request) -> web.StreamResponse:
    service = request.config_dict[SERVICE]
    limits, tokenizer = service.limits, service.engine.tokenizer

    def parse(body: dict[str, object]) -> list[int]:
        items = Fields(body).items("tokens", limit=MAX_IDS)
        if items is None:
            raise RequestError("tokens", "is missing")
        return [token_id("tokens", item, limits.n_vocab) for item in items]

    ids = await read_request(request, parse)
    text = await asyncio.to_thread(tokenizer.decode, ids, special=True)
    return json_response({"content": text})


def _parts(fields: Fields) -> list[object]:
    """`content` as a list: one text, or texts and token ids mixed; absent: nothing."""
    content = fields.raw("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return fields.items("content", limit=MAX_IDS) or []
    rule = "must be a string or a list of strings and token ids"
    raise fields.wrong("content", rule, content)


def _piece(tokenizer: Tokenizer, identifier: int) -> str | list[int]:
    """The token's text, or its bytes where they are no whole characters."""
    raw = tokenizer.token_bytes(identifier)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
