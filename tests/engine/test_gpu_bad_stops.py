"""SIGTERM and closing at any time, on one GPU and on two: an error in time, nothing left behind.

No kernel computes anything here: `StubKernels`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runtime.engine.engine import Engine
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.errors import EngineClosed
from runtime.experts import cached_experts
from server.app import create_app
from server.listen import listening
from server.service import SERVICE, Service
from server.settings import ServerSettings
from tests.support.bad_gpu import BadDriver, bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.usefixtures("no_task_is_left")

LIMIT = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stops")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cubins: Path) -> BadDriver:
    fake = bad_machine(monkeypatch, cubins)
    fake.n_devices = request.param
    return fake


def settings_of(path: Path, cache: int) -> Any:
    return config_of(path, moe_expert_cache=cache, split_mode="layer")


class Stop:
    """The driver, whose streams stand still from the nth launch of a step on."""

    def __init__(self, gpu: BadDriver, engine: Engine, nth: int, patch: pytest.MonkeyPatch) -> None:
        executor: Any = engine.executor
        assert isinstance(executor, GPUExecutor)
        stream = executor._parts.stream
        self._gpu = gpu
        self._handles = [part.handle for part in getattr(stream, "streams", [stream])]
        self._wanted = gpu.calls["cuGraphLaunch"] + nth * len(self._handles)
        usual = gpu._cuGraphLaunch

        def launch(*args: Any) -> Any:
            if gpu.calls["cuGraphLaunch"] > self._wanted - len(self._handles):
                self.hold()
            return usual(*args)

        patch.setattr(gpu, "_cuGraphLaunch", launch)

    def hold(self) -> None:
        for handle in self._handles:
            self._gpu._get("stream", handle).held = True

    async def reached(self) -> None:
        while self._gpu.calls["cuGraphLaunch"] < self._wanted:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def release(self, *_: object) -> None:
        for handle in self._handles:
            self._gpu.release(handle)


@asynccontextmanager
async def served(config: Any) -> AsyncIterator[tuple[Service, str]]:
    """A server's service and address; leaving it is what SIGTERM does."""
    settings = ServerSettings(host="127.0.0.1", port=0, closing_seconds=0.1)
    app = create_app(config, settings)
    async with listening(app, settings) as addresses:
        app[SERVICE].listening.set()
        await app[SERVICE].attached.wait()
        yield app[SERVICE], addresses[0]


@pytest.mark.parametrize("cache", [-1, 2, 0], ids=["resident", "hybrid", "nothing held"])
@pytest.mark.parametrize("nth", [1, 2, 3], ids=["a prompt", "a token", "steps ahead"])
async def test_sigterm_in_the_middle(
    nth: int, cache: int, path: Path, gpu: BadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(LIMIT):
        async with served(settings_of(path, cache)) as (service, url):
            stop = Stop(gpu, service.engine, nth, monkeypatch)
            body = {"prompt": [5, 70], "n_predict": 50, "top_k": 1}
            asking = asyncio.create_task(session.post(f"{url}/completion", json=body))
            await stop.reached()
            began = time.monotonic()
            asking.add_done_callback(stop.release)
        assert time.monotonic() - began < 3
        response = await asking
        assert response.status == 503
        assert "closing" in (await response.json())["error"]["message"]
    assert gpu.live == {}


async def read(engine: Engine) -> list[int | None]:
    return [token.id async for token in engine.generate([5, 70], GREEDY, reuse_prefix=False)]


async def test_closing_while_a_resize_waits_for_a_step(
    path: Path, gpu: BadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(LIMIT), open_engine(settings_of(path, 2)) as engine:
        stop = Stop(gpu, engine, 1, monkeypatch)
        reading = asyncio.create_task(read(engine))
        await stop.reached()
        resizing = asyncio.create_task(engine.resize(None))
        await asyncio.sleep(0)
        engine.close()
        for task in (reading, resizing):
            with pytest.raises(EngineClosed):
                await task
        stop.release()
    assert gpu.live == {}


async def test_closing_in_the_middle_of_a_resize(
    path: Path, gpu: BadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which goes on to its end; then everything is given back."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop, usual = asyncio.get_running_loop(), cached_experts.load_first

    def slow(*args: Any, **more: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(LIMIT)
        return usual(*args, **more)

    async with asyncio.timeout(LIMIT), open_engine(settings_of(path, 2)) as engine:
        assert await read(engine) == [0, 0, 0]
        monkeypatch.setattr(cached_experts, "load_first", slow)
        resizing = asyncio.create_task(engine.resize(None))
        await begun.wait()
        engine.close()
        with pytest.raises(EngineClosed):
            await resizing
        go_on.set()
    assert gpu.live == {}
