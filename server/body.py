"""Reading a request's JSON with limits, and writing JSON answers.

Limits come before the work: size while reading, number and nesting of values before parsing.
Bodies above 64 KiB are scanned and parsed in a thread, so that a large one does not hold up other
streams.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from server.errors import CONTENT_TYPE, ApiError, Invalid

MAX_BODY_BYTES = 32 << 20
BODY_SECONDS = 120.0
MAX_DEPTH = 64
MAX_VALUES = 1_000_000
INLINE_BYTES = 64 << 10
T = TypeVar("T")

_PIECE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


async def read_request(request: web.Request, parse: Callable[[dict[str, object]], T]) -> T:
    """What `parse` makes of the request's body, a JSON object.

    Raises: ApiError 400, 408, 413 or 415 with what is wrong, and whatever `parse` raises.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "invalid_request_error", "compressed request bodies are not accepted")
    if "Origin" in request.headers and not request.content_type.endswith("json"):
        # A page may post a form to any address without asking first; JSON needs a preflight.
        raise ApiError(415, "invalid_request_error", "send Content-Type: application/json")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "invalid_request_error", "the body did not arrive in time") from None

    def parsed() -> T:
        value = decode(body)
        if not isinstance(value, dict):
            raise Invalid("the body must be a JSON object")
        return parse(value)

    return parsed() if len(body) <= INLINE_BYTES else await asyncio.to_thread(parsed)


def decode(body: bytes) -> object:
    """The JSON value in `body`, within the limits of this file.  Raises: Invalid."""
    if not body.strip():
        raise Invalid("the body is empty; send a JSON object")
    check_shape(body)
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body is not valid JSON: {error}") from error


def json_response(value: object, *, status: int = 200) -> web.Response:
    """`value` as a JSON answer with the content type llama-server uses."""
    return web.Response(
        status=status, body=msgspec.json.encode(value), headers={"Content-Type": CONTENT_TYPE}
    )


def check_shape(body: bytes) -> None:
    """Refuse too many or too deeply nested values.

    Strings and containers are counted; numbers are cheap.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for count, piece in enumerate(_PIECE.finditer(body)):
        first = body[piece.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Invalid(f"the JSON is nested deeper than {MAX_DEPTH} levels")
        elif first in b"]}":
            depth -= 1
        if count >= MAX_VALUES:
            raise Invalid(f"the JSON has more than {MAX_VALUES} strings, arrays and objects")
