"""Who may call: API keys, the Host and Origin of browsers, and the CORS headers that follow from
them.

A web page anywhere can send requests to a server on this machine.  `Origin` tells which page it is;
`Host`
unmasks a page whose own name was made to point here (DNS rebinding).  Without a key both are
checked.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from runtime.errors import ConfigError
from server.errors import Forbidden, Invalid, Unauthorized

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PUBLIC_PATHS = ("/health", "/v1/health")
CORS_METHODS = "GET, POST, OPTIONS"
CORS_HEADERS = "Authorization, Content-Type, X-Api-Key"


class Gate:
    """Decides whether a request may pass.

    keys     any of them opens everything; none: no key is asked for
    origins  what --cors-origins said: "localhost", "*", or web origins
    host     the address the server listens on

    Raises: ConfigError for an impossible combination.
    """

    def __init__(self, keys: tuple[str, ...], origins: tuple[str, ...], host: str) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._any_origin = "*" in origins
        self._local_origins = "localhost" in origins or not origins
        self._origins = frozenset(
            _origin(text) for text in origins if text not in ("*", "localhost")
        )
        if self._any_origin and not keys:
            raise ConfigError(
                "--cors-origins *: every web page could use this server; set --api-key as well, "
                "or list the origins"
            )
        named = {urlsplit(origin).hostname or "" for origin in self._origins}
        self._hosts = frozenset({host.lower(), socket.gethostname().lower(), *named})

    def check(self, request: web.Request) -> None:
        """Raises: Invalid, Forbidden or Unauthorized."""
        self._check_host(request)
        self._check_origin(request)
        if self._keys and not self._is_public(request) and not self._has_key(request):
            raise Unauthorized

    def cors_headers(self, request: web.Request) -> dict[str, str]:
        """The headers that let the page at the request's (allowed) Origin read the answer."""
        origin = request.headers.get("Origin")
        if origin is None or not self._allows(origin, request):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": CORS_METHODS,
            "Access-Control-Allow-Headers": CORS_HEADERS,
            "Vary": "Origin",
        }

    def _is_public(self, request: web.Request) -> bool:
        prefix = request.config_dict[API_PREFIX]
        return request.path.removeprefix(prefix) in PUBLIC_PATHS

    def _has_key(self, request: web.Request) -> bool:
        sent = request.headers.get("X-Api-Key") or request.headers.get("Authorization") or ""
        scheme, _, rest = sent.partition(" ")
        key = (rest if scheme.lower() == "bearer" else sent).strip().encode("utf-8", "replace")
        # Every key is compared in full, so that the time tells nothing about them.
        return any([hmac.compare_digest(key, known) for known in self._keys])

    def _check_host(self, request: web.Request) -> None:
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1:
            raise Invalid("more than one Host header")
        if self._keys or not hosts:  # only HTTP/1.0 may come without one, and no browser does
            return
        name = _host_name(hosts[0])
        if name is None:
            raise Invalid("the Host header is malformed")
        if not (_is_local(name) or _is_address(name) or name in self._hosts):
            raise Forbidden(
                "this Host name is not known here; list it in --cors-origins (http://NAME), "
                "or set --api-key"
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and not self._allows(origin, request):
            raise Forbidden("this web origin may not use the server; see --cors-origins")

    def _allows(self, origin: str, request: web.Request) -> bool:
        if self._any_origin:
            return True
        parts = _split(origin)
        if parts is None:
            return False
        same = request.headers.get("Host", "").lower() == parts.netloc.lower()
        local = self._local_origins and _is_local(parts.hostname or "")
        return same or local or origin.lower() in self._origins


GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)
API_PREFIX: web.AppKey[str] = web.AppKey("api_prefix", str)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let the request pass the gate; a preflight is answered here."""
    gate = request.config_dict[GATE]
    if request.method == "OPTIONS":
        return web.Response(status=200, headers=gate.cors_headers(request))
    gate.check(request)
    return await handler(request)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: runs before the headers of any answer leave, streams included."""
    response.headers.update(request.config_dict[GATE].cors_headers(request))
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = "hotexpert"


def _split(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return None
    return parts if usable else None


def _origin(text: str) -> str:
    parts = _split(text)
    if parts is None or parts.path not in ("", "/"):
        raise ConfigError(
            f"--cors-origins {text}: use 'localhost', '*' or origins like https://example.org"
        )
    return f"{parts.scheme}://{parts.netloc}".lower()


def _host_name(host: str) -> str | None:
    """The name in a Host header without its port, lower case."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_local(name: str) -> bool:
    return name in ("localhost", "127.0.0.1", "::1") or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
