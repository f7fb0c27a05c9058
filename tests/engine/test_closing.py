"""Closing ends, whatever a worker or a GPU does: with a typed error, and the process can end."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engine import closing, cpu_executor, opening
from runtime.engine.closing import close_within
from runtime.engine.gpu import executor as executor_file
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.engine.step import StepKind
from runtime.errors import CloseStalled, DeviceStalled, EngineClosed
from runtime.models import open_model
from tests.engine.test_cpu_executor import executor_of as cpu_executor_of
from tests.engine.test_cpu_executor import step_of
from tests.engine.test_gpu_executor import TOKENS
from tests.support.bad_gpu import BadDriver, bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS

LIMIT = 60
SOON = 0.05


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("closing")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(directory / "model.gguf")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> BadDriver:
    return bad_machine(monkeypatch, tmp_path_factory.mktemp("cubins"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (executor_file, cpu_executor):
        monkeypatch.setattr(file, "CLOSING_SECONDS", SOON)
    monkeypatch.setattr(cpu_executor, "LOOK_SECONDS", SOON / 5)


def joined() -> None:
    """Wait for closings that go on."""
    for thread in threading.enumerate():
        if thread.name in (closing.THREAD_NAME, closing.LEFT_NAME):
            thread.join(LIMIT)
    assert not opening.left_behind()


class StuckJob:
    """A job that a worker does not return from until `go_on` is set."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

        def wait(*args: int) -> None:
            self.began.set()
            self.go_on.wait(LIMIT)

        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._function = kind(wait)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value


@pytest.fixture
def stuck() -> Iterator[StuckJob]:
    job = StuckJob()
    yield job
    job.go_on.set()
    joined()


async def test_what_closes_in_time_is_waited_for_and_its_error_raised() -> None:
    closed: list[str] = []
    await close_within(lambda: closed.append(threading.current_thread().name), LIMIT)
    assert closed == [closing.THREAD_NAME]

    def fails() -> None:
        raise EngineClosed("no")

    with pytest.raises(EngineClosed):
        await close_within(fails, LIMIT)
    go_on = threading.Event()
    with pytest.raises(CloseStalled, match="end the process"):
        await close_within(lambda: bool(go_on.wait(LIMIT)) and None, SOON)
    assert opening.left_behind()
    go_on.set()
    joined()


@pytest.mark.usefixtures("impatient")
async def test_a_worker_of_the_cpu_that_never_returns(path: Path, stuck: StuckJob) -> None:
    with open_model(path) as model:
        with pytest.raises(CloseStalled):
            async with asyncio.timeout(LIMIT), cpu_executor_of(model, n_threads=1) as executor:
                made: Any = executor
                made._program._jobs["function"][0] = stuck.address
                step = step_of(executor, StepKind.PREFILL, [(0, TOKENS[:2], 0)])
                running = asyncio.create_task(executor.run(step))
                assert await asyncio.to_thread(stuck.began.wait, LIMIT)
                running.cancel()
        assert opening.left_behind()
        stuck.go_on.set()
        joined()


@pytest.mark.usefixtures("impatient")
async def test_a_worker_of_a_hybrid_step_that_never_returns(
    path: Path, stuck: StuckJob, gpu: BadDriver
) -> None:
    with pytest.raises(CloseStalled):
        async with (
            asyncio.timeout(LIMIT),
            open_engine(config_of(path, moe_expert_cache=2)) as engine,
        ):
            made: Any = engine.executor
            for serve in made._parts.exchange._serves:
                serve.program._jobs["function"][0] = stuck.address
            reading = asyncio.create_task(_read(engine))
            assert await asyncio.to_thread(stuck.began.wait, LIMIT)
            engine.close()
            with pytest.raises(EngineClosed):
                await reading
    stuck.go_on.set()
    joined()
    assert gpu.live == {}


@pytest.mark.usefixtures("impatient")
async def test_a_gpu_that_never_ends_is_not_waited_for(path: Path, gpu: BadDriver) -> None:
    with pytest.raises(DeviceStalled):
        async with asyncio.timeout(LIMIT), open_engine(config_of(path)) as engine:
            made: Any = engine.executor
            gpu._get("stream", made._parts.stream.handle).held = True
            n_before = gpu.calls["cuGraphLaunch"]
            reading = asyncio.create_task(_read(engine))
            await _until(lambda: gpu.calls["cuGraphLaunch"] > n_before)
            began = time.monotonic()
            engine.close()
            with pytest.raises(EngineClosed):
                await reading
    assert time.monotonic() - began < LIMIT / 2
    joined()
    assert gpu.live == {}


async def _read(engine: Any) -> list[int | None]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [token.id async for token in engine.generate([5, 70], params)]


async def _until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0)


STUCK_PROGRAM = """
import asyncio, threading
from runtime import commands
from runtime.engine.closing import close_within
from runtime.errors import CloseStalled

def run(settings):
    asyncio.run(close_within(threading.Event().wait, 0.01))

import runtime.commands.inspect as command
command.run = run
raise SystemExit(commands.main(["inspect"]))
"""


def test_a_program_ends_although_a_worker_does_not() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK_PROGRAM], capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 1
    assert "end the process" in ended.stderr
