"""The process: start, SIGTERM at any time, restart on the same port, a model that fails."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

FAKE = ("--device-kind", "fake")


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    """A server process, its address, and the log lines until it was ready."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime.server", *flags, stderr=asyncio.subprocess.PIPE
    )
    assert child.stderr is not None
    try:
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ready: "):
            line = (await child.stderr.readline()).decode()
            assert line, "the server ended: " + "".join(lines)
            lines.append(line)
        yield child, lines[-1].split()[1].rstrip(","), lines
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_sigterm_ends_streams_and_exits_with_0() -> None:
    async with process(*FAKE, "--port", "0", "-lv", "3") as (child, url, _):
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "n_probs": 100}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/completion", json=body) as response,
        ):
            await response.content.readuntil(b"\n\n")
            begun = time.perf_counter()
            child.send_signal(signal.SIGTERM)
            rest = await response.content.read()  # raises if the stream is cut off
            assert await child.wait() == 0
            assert time.perf_counter() - begun < 5
    last = rest.decode().strip().split("\n\n")[-1]
    event = json.loads(last.removeprefix("data: "))
    assert event.get("stop") or event["error"]["type"] == "unavailable_error"


SLOW_LOAD = """
import asyncio, contextlib, sys, time
import server.app, server.cli

@contextlib.asynccontextmanager
async def slow(config, progress):
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, time.sleep, 60))
    yield

server.app.open_engine = slow
sys.exit(server.cli.main(["--device-kind", "fake", "--port", "0"]))
"""


async def test_sigterm_while_loading_does_not_wait_for_the_load() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLOW_LOAD, stderr=asyncio.subprocess.PIPE
    )
    assert child.stderr is not None
    while not (line := await child.stderr.readline()).startswith(b"listening"):
        assert line
    begun = time.perf_counter()
    child.send_signal(signal.SIGTERM)
    assert await child.wait() == 0
    assert time.perf_counter() - begun < 5


async def test_restart_on_the_same_port() -> None:
    async with process(*FAKE, "--port", "0") as (child, url, _), aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as response:
            assert response.status == 200
        child.send_signal(signal.SIGINT)  # the connection is kept alive and idle
        assert await child.wait() == 0
    async with process(*FAKE, "--port", url.rsplit(":", 1)[1]) as (child, again, _):
        assert again == url
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_a_model_that_cannot_be_read_ends_with_1(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    for path in (str(model), str(tmp_path / "absent.gguf")):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "runtime.server", "-m", path, "--port", "0",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, log = await child.communicate()
        assert child.returncode == 1
        assert path in log.decode().strip().splitlines()[-1]
        assert b"Traceback" not in log


async def test_a_taken_port_is_said() -> None:
    async with process(*FAKE, "--port", "0") as (_, url, _):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "runtime.server", *FAKE, "--port", url.rsplit(":", 1)[1],
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, log = await child.communicate()
    assert child.returncode == 1
    assert "--port" in log.decode().splitlines()[-1]


@pytest.mark.parametrize("flag", ["--log-jsonl", "--log-prefix"])
async def test_log_forms(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime.server", *FAKE, "--port", "0", flag, "--log-disable",
        "--log-file", str(file), "-m", str(tmp_path / "absent.gguf"),
    )  # fmt: skip
    assert await child.wait() == 1
    lines = (await asyncio.to_thread(file.read_text)).splitlines()
    if flag == "--log-jsonl":
        assert json.loads(lines[0])["level"] == "info"
    else:
        assert lines[0].startswith("info: server.")
