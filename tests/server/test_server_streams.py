"""Streams on the wire: framing, pings, errors, back-pressure, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

import runtime
from tests.server.serving import CHAT, Served, serving

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def raw_request(served: Served, path: str, body: dict[str, object]) -> Connection:
    """Send a POST over a bare socket and leave the answer unread."""
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**12)
    data = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    await writer.drain()
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


async def test_framing_of_a_chat_stream(served: Served) -> None:
    served.say("ab")
    body = CHAT | {"stream": True, "temperature": 0}
    async with served.session.post(served.url + "/v1/chat/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Accel-Buffering"] == "no"
        raw = await response.read()
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert b"\r" not in raw
    *chunks, done = [event.removeprefix("data: ") for event in raw.decode().strip().split("\n\n")]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": "a"}, {"content": "b"}]
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert "timings" in json.loads(chunks[-1])


async def test_connection_stays_usable_after_a_stream(served: Served) -> None:
    for _ in range(3):
        await served.events("/completion", {"prompt": "x", "n_predict": 2})
    connector = served.session.connector
    assert connector is not None
    assert sum(len(idle) for idle in connector._conns.values()) == 1


async def test_error_before_the_first_token_is_a_plain_one(served: Served) -> None:
    served.device.fail_when(lambda step: True)
    status, body = await served.post("/v1/chat/completions", CHAT | {"stream": True})
    assert (status, body["error"]["type"]) == (500, "server_error")
    status, body = await served.post("/completion", {"prompt": [97] * 5000, "stream": True})
    assert (status, body["error"]["type"]) == (400, "exceed_context_size_error")


async def test_error_after_the_first_token_is_inside_the_stream(served: Served) -> None:
    served.device.fail_when(lambda step: step.positions.max() >= 6)
    events = await served.events(
        "/completion", {"prompt": "abc", "n_predict": 9, "ignore_eos": True}
    )
    assert "content" in events[0]
    assert events[-1]["error"]["code"] == 500
    served.device.fail_when(None)
    await served.until(served.is_idle)


async def test_pings_while_nothing_comes() -> None:
    async with serving(ping_interval=0.01) as served:
        with served.device.hold() as gate:
            _, writer = connection = await raw_request(
                served, "/completion", {"prompt": "x", "n_predict": 1, "stream": True}
            )
            raw = await asyncio.wait_for(connection[0].readuntil(b":\n\n\r\n"), 5)
            assert b"200 OK" in raw
            assert b"data:" not in raw
            gate.open()
        rest = await connection[0].readuntil(b"0\r\n\r\n")
        assert b'"stop":true' in rest
        await close(writer)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
async def test_a_client_that_leaves_frees_its_sequence(
    served: Served, path: str, *, stream: bool
) -> None:
    body = CHAT | {"prompt": "x", "max_tokens": -1, "ignore_eos": True, "stream": stream}
    with served.device.hold() as gate:
        _, writer = await raw_request(served, path, body)
        for _ in range(3):
            await gate.reached()
            gate.release()
        assert served.engine.statistics().n_running == 1
        await close(writer)
        gate.open()
        await served.until(served.is_idle)
    counters = served.engine.statistics().counters
    assert counters.predicted_tokens < 50, "the answer ran on after its client had left"
    assert served.service.n_open_requests == 0


async def test_a_client_that_leaves_the_queue_is_never_computed() -> None:
    async with serving(runtime.EngineConfig(device="fake", n_parallel=1)) as served:
        with served.device.hold() as gate:
            running = asyncio.create_task(
                served.post("/completion", {"prompt": "x", "n_predict": 2})
            )
            await gate.reached()
            _, writer = await raw_request(served, "/completion", {"prompt": "queued"})
            await served.until(lambda: served.engine.statistics().n_waiting == 1)
            await close(writer)
            await served.until(lambda: served.service.n_open_requests == 1)
        assert (await running)[0] == 200
        await served.until(served.is_idle)
        assert served.engine.statistics().counters.prompt_tokens == 1


async def test_a_client_that_never_reads_stops_nobody() -> None:
    config = runtime.EngineConfig(device="fake", n_parallel=2)
    async with serving(config) as served:
        lazy = {
            "prompt": "x",
            "n_predict": 4000,
            "ignore_eos": True,
            "n_probs": 200,
            "stream": True,
        }
        _, writer = await raw_request(served, "/completion", lazy)
        await served.until(lambda: served.engine.statistics().n_running == 1)
        for _ in range(5):
            status, _ = await served.post("/completion", {"prompt": "y", "n_predict": 5})
            assert status == 200
        await close(writer)
        await served.until(served.is_idle)
        await served.until(lambda: served.service.n_open_requests == 0)


async def test_a_client_that_never_reads_is_dropped_in_the_end() -> None:
    async with serving(write_timeout=0.1) as served:
        lazy = {
            "prompt": "x",
            "n_predict": 2000,
            "ignore_eos": True,
            "n_probs": 250,
            "stream": True,
        }
        _, writer = await raw_request(served, "/completion", lazy)
        await served.until(lambda: served.service.n_open_requests == 1)
        await served.until(lambda: served.service.n_open_requests == 0)
        await close(writer)


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    request = f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    writer.write(request * 3)
    for _ in range(3):
        assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
    await close(writer)


async def test_http_1_0_is_answered(served: Served) -> None:
    parts = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    assert b'{"status":"ok"}' in await reader.read()
    await close(writer)


async def test_a_storm_of_cancellations_leaves_nothing_behind(served: Served) -> None:
    async def leave_early(number: int) -> None:
        body = {"prompt": f"storm {number}", "ignore_eos": True, "stream": number % 2 == 0}
        reader, writer = await raw_request(served, "/completion", body)
        if number % 4 == 0:
            await reader.readline()
        await close(writer)

    await asyncio.gather(*(leave_early(number) for number in range(60)))
    await served.until(lambda: served.service.n_open_requests == 0)
    await served.until(served.is_idle)
    statistics = served.engine.statistics()
    assert statistics.n_pages_free + statistics.n_pages_cached >= statistics.n_pages
    assert (await served.post("/completion", {"prompt": "x", "n_predict": 1}))[0] == 200
