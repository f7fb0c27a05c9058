"""Keys, hosts, origins, and connections that mean harm."""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest

from runtime import ConfigError
from server.listen import MAX_HEADER_BYTES
from server.security import Gate
from tests.server.serving import CHAT, Served, serving

KEYS = ("first-key", "second")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"}, {"Authorization": "bearer second"},
        {"Authorization": "second"}, {"X-Api-Key": "second"}, {"Authorization": "Bearer  second "},
    ],
)  # fmt: skip
async def test_right_keys(headers: dict[str, str]) -> None:
    async with serving(api_keys=KEYS) as served:
        assert (await served.get("/props", headers=headers))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "Bearer first-ke"},
        {"X-Api-Key": ""},
        {"Authorization": "Bearer first-keyy"}, {"Authorization": "Bearer"},
        {"Authorization": "Bearer é"},
        {"Authorization": "Basic first-key"}, {"X-Api-Key": "first-key,second"},
    ],
)  # fmt: skip
async def test_wrong_keys(headers: dict[str, str]) -> None:
    async with serving(api_keys=KEYS, metrics=True) as served:
        for path in ("/v1/models", "/props", "/slots", "/metrics", "/nope", "/health/../props"):
            status, body = await served.get(path, headers=headers)
            assert status == 401, path
            assert body["error"] == {
                "code": 401, "message": "Invalid API Key", "type": "authentication_error"
            }  # fmt: skip
        assert (await served.post("/v1/chat/completions", CHAT, headers=headers))[0] == 401
        assert (await served.get("/v1/models?api_key=first-key", headers=headers))[0] == 401
        assert (await served.get("/health"))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8080", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
        ("192.168.7.7:8080", 200), ("box.localhost", 200), ("evil.example", 403),
        ("127.0.0.1.nip.io", 403), ("evil.example:8080", 403), ("localhost.evil.example", 403),
        ("my.site:8080", 200), ("[::1", 400), ("", 400),
    ],
)  # fmt: skip
async def test_host_names(host: str, status: int) -> None:
    async with serving(cors_origins=("localhost", "http://my.site")) as served:
        got, _ = await served.get("/v1/models", headers={"Host": host})
        assert got == status
    async with serving(api_keys=KEYS) as served:
        got, _ = await served.get(
            "/v1/models", headers={"Host": "evil.example", "X-Api-Key": "second"}
        )
        assert got == 200, "with a key any name may be used"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("https://app.localhost", 200),
        ("https://evil.example", 403), ("null", 403), ("file://", 403),
        ("http://localhost.evil", 403),
        ("https://good.example", 200), ("https://good.example:444", 403),
        ("http://good.example", 403),
        ("http://[", 403),
    ],
)  # fmt: skip
async def test_origins(origin: str, status: int) -> None:
    async with serving(cors_origins=("localhost", "https://good.example")) as served:
        headers = {"Origin": origin}
        async with served.session.post(
            served.url + "/v1/chat/completions", json=CHAT, headers=headers
        ) as response:
            assert response.status == status
            allowed = response.headers.get("Access-Control-Allow-Origin")
            assert allowed == (origin if status == 200 else None)
        body = CHAT | {"stream": True}
        async with served.session.post(
            served.url + "/v1/chat/completions", json=body, headers=headers
        ) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
        async with served.session.options(served.url + "/any/path", headers=headers) as response:
            assert response.status == 200
            assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_a_page_cannot_post_a_form(served: Served) -> None:
    async with served.session.post(
        served.url + "/completion",
        data=b'{"prompt": "x"}',
        headers={"Origin": "http://localhost:3000", "Content-Type": "text/plain"},
    ) as response:
        assert response.status == 415


async def test_preflight_needs_no_key() -> None:
    async with serving(api_keys=KEYS, cors_origins=("*",)) as served:
        headers = {"Origin": "https://anywhere.example"}
        async with served.session.options(served.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == headers["Origin"]
            assert "X-Api-Key" in response.headers["Access-Control-Allow-Headers"]


def test_any_origin_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="cors-origins"):
        Gate((), ("*",), "127.0.0.1")
    with pytest.raises(ConfigError, match="cors-origins"):
        Gate((), ("not an origin",), "127.0.0.1")


async def exchange(served: Served, *pieces: bytes) -> bytes:
    """Send bytes over a bare socket and read until the server closes."""
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n"],
        [HEAD, b"X: " + b"a" * 40_000 + b"\r\n\r\n"],
        [HEAD, *[b"X: " + b"a" * 100_000] * 640],
        [HEAD, b"".join(b"X%d: y\r\n" % number for number in range(10_000)), b"\r\n"],
        [HEAD, b"".join(b"X%d: y\r\n" % number for number in range(500)), b"\r\n"],
        [HEAD, b"Host: evil.example\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
        [b"GET /health HTTP/9.9\r\n\r\n"],
        [HEAD, b"X: a\x00b\r\n\r\n"],
        [b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}"],
        [b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
         b"Transfer-Encoding: chunked\r\n\r\n{}"],

        [b"POST /completion HTTP/1.1\r\nHost: localhost\r\n"
         b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"],
    ],
)  # fmt: skip
async def test_hostile_headers(served: Served, pieces: list[bytes]) -> None:
    answer = await exchange(served, *pieces)
    assert b"200 OK" not in answer
    assert b" 500 " not in answer
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"aiohttp" not in head
        assert b"Content-Type: application/json" in head
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) in {
            ("invalid_request_error", 400), ("invalid_request_error", 431)
        }  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            b"X: " + b"a" * 20_000 + b"\r\n",
            "the request line or a header field is over 16384 bytes",
        ),
        (b"X: y\r\n" * 200, "there are more than 128 header fields"),
    ],
    ids=["field", "number"],
)
async def test_headers_beyond_a_limit(served: Served, headers: bytes, message: str) -> None:
    assert_too_large(await exchange(served, HEAD + headers + b"\r\n"), message)


async def test_headers_too_large_in_all(served: Served) -> None:
    fields = (b"X: " + b"a" * 1000 + b"\r\n") * 100
    # Not one byte stays unread, which would reset the connection; the end need not come.
    unended = (HEAD + fields)[: MAX_HEADER_BYTES + 1]
    assert_too_large(await exchange(served, unended), "the headers are too large")
    ended = HEAD + fields[: MAX_HEADER_BYTES + 1 - len(HEAD)] + b"\r\n\r\n"
    assert_too_large(await exchange(served, ended), "the headers are too large")


def assert_too_large(answer: bytes, message: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0].endswith(b" 431 Request Header Fields Too Large")
    error = {"code": 431, "message": message, "type": "invalid_request_error"}
    assert json.loads(body) == {"error": error}


async def test_a_body_announced_too_large_is_refused_at_once(served: Served) -> None:
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    )
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        await reader.readuntil(b"\r\n\r\n")
        error = json.loads(await reader.readuntil(b"}}"))["error"]
    assert (error["code"], error["type"]) == (413, "invalid_request_error")
    assert error["message"].endswith("the body is too large")
    writer.close()


async def test_malformed_http_does_not_fill_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for line in (b"\x16\x03\x01", b"GET http://[::1/health HTTP/1.1", b"GET / HTTP/1.1\r\nA b: c"):
        assert b"malformed HTTP" in await exchange(served, line + b"\r\n\r\n")
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert (await served.get("/health"))[0] == 200


async def test_slow_headers_are_cut_off(served: Served) -> None:
    assert await exchange(served, b"GET /health HTT") == b""
    assert await exchange(served) == b""


async def test_unfinished_body_holds_nobody_up(served: Served) -> None:
    parts = urlsplit(served.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    assert (await served.post("/completion", {"prompt": "x", "n_predict": 1}))[0] == 200
    writer.close()


async def test_many_idle_connections(served: Served) -> None:
    parts = urlsplit(served.url)
    idle = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(200)]
    assert (await served.post("/completion", {"prompt": "x", "n_predict": 1}))[0] == 200
    for _, writer in idle:
        writer.close()


async def test_header_injection_is_impossible(served: Served) -> None:
    async with serving(aliases=("a\r\nX-Evil: 1",)) as other:
        status, body = await other.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert body["model"] == "a\r\nX-Evil: 1"
