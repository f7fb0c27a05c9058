"""What a client is told when a request fails: exception class -> status, type and body.

The body is llama-server's and OpenAI's: `{"error": {"code": N, "message": S, "type": T}}`.
"""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from runtime.errors import (
    ComputeError,
    ConfigError,
    ContextTooLong,
    EngineBug,
    EngineClosed,
    EngineError,
    ModelError,
    RequestError,
    TemplateError,
    TokenizerUnavailable,
)

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/json; charset=utf-8"


class ApiError(Exception):
    """A request the server itself refuses, with the status and type the client will see."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


class Invalid(ApiError):
    """400: the request as a whole is wrong (a wrong field is a `RequestError`)."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "invalid_request_error", message)


class NotSupported(ApiError):
    """501: a feature that is not there, or was not switched on at start."""

    def __init__(self, message: str) -> None:
        super().__init__(501, "not_supported_error", message)


class Unauthorized(ApiError):
    """401: the key is missing or wrong."""

    def __init__(self) -> None:
        super().__init__(401, "authentication_error", "Invalid API Key")


class Forbidden(ApiError):
    """403: this caller may not do this here."""

    def __init__(self, message: str) -> None:
        super().__init__(403, "permission_error", message)


class Unavailable(ApiError):
    """503: loading, closing, or no free slot on request."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "unavailable_error", message)


# First match wins: subclasses stand before their bases.
STATUS: tuple[tuple[type[EngineError], int, str], ...] = (
    (ContextTooLong, 400, "exceed_context_size_error"),
    (RequestError, 400, "invalid_request_error"),
    (TemplateError, 400, "invalid_request_error"),
    (TokenizerUnavailable, 501, "not_supported_error"),
    (EngineClosed, 503, "unavailable_error"),
    (ComputeError, 500, "server_error"),
    (EngineBug, 500, "server_error"),
    (ConfigError, 500, "server_error"),
    (ModelError, 500, "server_error"),
    (EngineError, 500, "server_error"),
)


def describe(error: Exception) -> tuple[int, dict[str, object]]:
    """The status and the `error` object for `error`.

    What was not raised on purpose is logged, not told.
    """
    if isinstance(error, ApiError):
        return error.status, _object(error.status, error.message, error.kind)
    if isinstance(error, web.HTTPException):
        return _from_http(error)
    for kind, status, name in STATUS:
        if isinstance(error, kind):
            body = _object(status, str(error), name)
            if isinstance(error, ContextTooLong):
                body |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
            if status >= 500 and not isinstance(error, EngineClosed):
                logger.error("request failed: %s", error, exc_info=error)
            return status, body
    logger.error("request failed: an unexpected %s", type(error).__name__, exc_info=error)
    return 500, _object(500, "internal error; the server's log has the details", "server_error")


def error_response(error: Exception) -> web.Response:
    """The whole HTTP answer for `error`."""
    status, body = describe(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(
        status=status,
        body=msgspec.json.encode({"error": body}),
        headers={"Content-Type": CONTENT_TYPE, **headers},
    )


def _from_http(error: web.HTTPException) -> tuple[int, dict[str, object]]:
    """aiohttp's own refusals in our words.

    A wrong method on a known path is a 404, as in llama-server.
    """
    if error.status in (404, 405):
        return 404, _object(404, "File Not Found", "not_found_error")
    message = f"{error.reason}: the body is too large" if error.status == 413 else str(error.reason)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return error.status, _object(error.status, message, kind)


def _object(code: int, message: str, kind: str) -> dict[str, object]:
    # A message may quote the client's text: what UTF-8 cannot carry is replaced.
    safe = message.encode("utf-8", "replace").decode("utf-8")
    return {"code": code, "message": safe, "type": kind}
