"""The GPU path on bad days: a typed error, never a hang, nothing left behind.

No kernel computes anything here: `StubKernels`. Opening and stopping have tests of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ops.gpu.mailbox import PATIENCE_NS
from runtime.engine.engine import Engine
from runtime.engine.gpu import step_ends
from runtime.engine.gpu.captured_steps import CapturedStep
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.engine.step import StepKind
from runtime.errors import (
    CorruptModel,
    CudaError,
    DeviceLost,
    DeviceStalled,
    EngineClosed,
    ExchangeStalled,
    OutOfDeviceMemory,
    OutOfGraphMemory,
    PinningFailed,
)
from runtime.notices import Reason
from tests.support.bad_gpu import BadDriver, bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.cuda_constants import CUresult
from tests.support.stub_kernels import StubKernels

pytestmark = pytest.mark.usefixtures("no_task_is_left")

LIMIT = 100
"""Seconds after which a test hangs; kernels of the CPU may have to be compiled."""

HYBRID: dict[str, Any] = {"moe_expert_cache": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
DRAWN_BY_THE_HOST = SamplingParams(top_k=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> BadDriver:
    return bad_machine(monkeypatch, cubins)


async def read(engine: Engine, params: SamplingParams = GREEDY) -> list[int | None]:
    return [token.id async for token in engine.generate([5, 70], params, reuse_prefix=False)]


def executor_of(engine: Engine) -> GPUExecutor:
    assert isinstance(engine.executor, GPUExecutor)
    return engine.executor


def stream_of(engine: Engine) -> Any:
    """The driver's handle of the stream of steps."""
    stream: Any = executor_of(engine)._parts.stream
    return stream.handle


async def test_two_engines_on_one_gpu(path: Path, gpu: BadDriver) -> None:
    async with open_engine(config_of(path)) as first:
        async with open_engine(config_of(path, moe_expert_cache=2)) as second:
            assert list(await asyncio.gather(read(first), read(second))) == [[0, 0, 0]] * 2
        assert await read(first) == [0, 0, 0]
    assert gpu.live == {}


@pytest.mark.parametrize(
    ("cache", "code", "kind"),
    [
        (-1, "ILLEGAL_ADDRESS", DeviceLost),
        (2, "ILLEGAL_ADDRESS", DeviceLost),
        (2, "UNKNOWN", CudaError),
    ],
)
async def test_a_lost_gpu_ends_the_engine_and_its_requests(
    cache: int, code: str, kind: type[CudaError], path: Path, gpu: BadDriver
) -> None:
    with pytest.raises(kind, match=code):
        async with (
            asyncio.timeout(LIMIT),
            open_engine(config_of(path, moe_expert_cache=cache)) as e,
        ):
            assert await read(e) == [0, 0, 0]
            gpu._get("stream", stream_of(e)).held = True
            reading = asyncio.create_task(read(e))
            await launched(gpu)
            gpu.lost = CUresult[f"CUDA_ERROR_{code}"]
            await asyncio.Event().wait()
    with pytest.raises(EngineClosed, match="the engine has failed") as error:
        await reading
    assert isinstance(error.value.__cause__, kind)
    with pytest.raises(EngineClosed):
        await read(e)
    assert "context" not in gpu.live


async def test_a_launch_that_finds_no_memory_ends_the_engine(path: Path, gpu: BadDriver) -> None:
    with pytest.raises(OutOfDeviceMemory, match="bytes free"):
        async with asyncio.timeout(LIMIT), open_engine(config_of(path, **HYBRID)) as engine:
            gpu.fail["cuGraphLaunch"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
            reading = asyncio.create_task(read(engine))
            await asyncio.Event().wait()
    with pytest.raises(EngineClosed, match="n_ctx"):
        await reading
    assert gpu.live == {}


def fill(gpu: BadDriver, left: int) -> None:
    """Let another process take the memory but for so many bytes; all that is free to use comes
    back with `gpu.memory_bytes = 1 << 30`."""
    held = sum(gpu._get("memory", handle).nbytes for handle in gpu._owners)
    gpu.memory_bytes = held + left


async def test_a_graph_without_memory_gets_that_of_experts(path: Path, gpu: BadDriver) -> None:
    """That of a prompt is captured when it is first needed."""
    async with asyncio.timeout(LIMIT), open_engine(config_of(path, **HYBRID)) as engine:
        experts = engine.describe()["expert_bytes"]
        assert experts
        for step in executor_of(engine)._parts.steps.all():
            step.seconds = 1e-3  # unused graphs would be the first to go
        fill(gpu, 100)
        assert await read(engine) == [0, 0, 0]
        assert engine.describe()["expert_bytes"] == 0
        [notice] = [n for n in engine.notices.all if n.reason is Reason.SHRUNK]
        assert "the experts' cache gives" in notice.text
        gpu.memory_bytes = 1 << 30
        assert await engine.resize(None) > experts  # as many as fit now
        assert await read(engine) == [0, 0, 0]
    assert gpu.live == {}


async def test_a_graph_that_finds_no_memory_fails_its_request(path: Path, gpu: BadDriver) -> None:
    async with asyncio.timeout(LIMIT), open_engine(config_of(path, **HYBRID)) as engine:
        gpu.fail["cuMemAlloc"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
        with pytest.raises(OutOfGraphMemory, match=r"a step of 2 tokens.*n_ctx"):
            await read(engine)
        del gpu.fail["cuMemAlloc"]
        assert await read(engine) == [0, 0, 0]
        assert engine.statistics().counters.requests_failed == 1
    assert gpu.live == {}


async def test_the_graph_of_larger_steps_serves_where_memory_is_short(
    path: Path, gpu: BadDriver
) -> None:
    async with asyncio.timeout(LIMIT), open_engine(config_of(path, n_batch=4)) as engine:
        four = [token.id async for token in engine.generate([5, 70, 71, 72], GREEDY)]
        n_graphs = engine.describe()["captured_graphs"]
        gpu.fail["cuMemAlloc"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
        assert await read(engine) == four == [0, 0, 0]
        assert engine.describe()["captured_graphs"] == n_graphs
        assert "larger steps" in engine.notices.all[-1].text
    assert gpu.live == {}


async def test_a_graph_for_one_generated_token_that_finds_no_memory_fails_it(
    path: Path, gpu: BadDriver
) -> None:
    """Where the GPU chooses tokens, and steps run ahead."""
    async with asyncio.timeout(LIMIT), open_engine(config_of(path)) as engine:
        assert await read(engine) == [0, 0, 0]
        steps = executor_of(engine)._parts.steps
        steps.drop([step.shape for step in steps.all() if step.shape.kind is StepKind.DECODE])
        executor_of(engine)._last = None
        gpu.fail["cuMemAlloc"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
        with pytest.raises(OutOfGraphMemory, match="a step of 1 tokens"):
            await read(engine)
        del gpu.fail["cuMemAlloc"]
        assert await read(engine) == [0, 0, 0]
    assert gpu.live == {}


async def launched(gpu: BadDriver) -> None:
    """Wait until one more step was launched."""
    before = gpu.calls["cuGraphLaunch"]
    async with asyncio.timeout(LIMIT):
        while gpu.calls["cuGraphLaunch"] == before:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("params", [GREEDY, DRAWN_BY_THE_HOST], ids=["on the GPU", "by the host"])
async def test_workers_that_are_late_fail_the_request_and_the_next_one_works(
    params: SamplingParams, path: Path, gpu: BadDriver
) -> None:
    """In the prompt's step, then in one of a generated token; the steps before it count, also where
    the one behind has failed before the host looked at them."""
    async with open_engine(config_of(path, **HYBRID)) as engine:
        for n_good in (0, 1, 2):
            tokens: list[int | None] = []
            impatient_after(gpu, n_good)
            with pytest.raises(ExchangeStalled, match="MoE layer 0"):
                async for token in engine.generate([5, 70], params, reuse_prefix=False):
                    tokens.append(token.id)
            assert len(tokens) == n_good
            impatient_after(gpu, -1)
            assert await read(engine, params) is not None
        assert engine.statistics().counters.requests_failed == 3
    assert gpu.live == {}


def impatient_after(gpu: BadDriver, n_steps: int) -> None:
    """Let the mailboxes of the step behind the next n_steps give up; -1: of none."""
    kernels = gpu.kernels
    assert isinstance(kernels, StubKernels)
    kernels.patient_steps = n_steps


def test_the_host_waits_longer_than_the_gpu_does_for_the_cpu() -> None:
    assert step_ends.STALLED_SECONDS > 1.5 * PATIENCE_NS / 1e9


@pytest.mark.parametrize("usual", [0.0, 1e-4], ids=["a first step", "a known one"])
async def test_a_stuck_worker_is_waited_for(
    usual: float, path: Path, gpu: BadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step fails as stalled once it goes on, and the workers serve the next: however long the
    GPU's steps take otherwise."""
    monkeypatch.setattr(step_ends, "STALLED_SECONDS", 0.01)
    go_on = threading.Event()
    waits = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
        lambda *args: (go_on.wait(), None)[1]
    )
    async with open_engine(config_of(path, **HYBRID)) as engine:
        exchange: Any = executor_of(engine)._parts.exchange
        programs = [serve.program for serve in exchange._serves]
        function = int(programs[0]._jobs[0]["function"])
        for program in programs:
            program._jobs["function"][0] = ctypes.cast(waits, ctypes.c_void_p).value
        impatient_after(gpu, 0)
        monkeypatch.setattr(CapturedStep, "seconds", property(lambda _: usual, lambda *_: None))
        reading = asyncio.create_task(read(engine))
        await launched(gpu)
        assert not exchange.idle
        await asyncio.wait([reading], timeout=0.05)
        assert not reading.done()
        for program in programs:
            program._jobs["function"][0] = function
        go_on.set()
        with pytest.raises(ExchangeStalled):
            await asyncio.wait_for(reading, LIMIT)
        impatient_after(gpu, -1)
        assert await read(engine) == [0, 0, 0]
    assert gpu.live == {}


async def test_a_chunk_that_no_worker_computes_fails_its_request(
    path: Path, gpu: BadDriver
) -> None:
    """As of a worker that raised or died: the GPU waits in vain, and the next step has workers."""
    undone = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
        lambda *args: None
    )
    async with open_engine(config_of(path, **HYBRID)) as engine:
        exchange: Any = executor_of(engine)._parts.exchange
        programs = [serve.program for serve in exchange._serves]
        at = programs[0].names.index("0.serve")
        function = int(programs[0]._jobs[at]["function"])
        for program in programs:
            program._jobs["function"][at] = ctypes.cast(undone, ctypes.c_void_p).value
        impatient_after(gpu, 0)
        with pytest.raises(ExchangeStalled):
            await asyncio.wait_for(read(engine), LIMIT)
        for program in programs:
            program._jobs["function"][at] = function
        impatient_after(gpu, -1)
        assert await read(engine) == [0, 0, 0]
    assert gpu.live == {}


async def test_a_step_without_an_end_ends_the_engine(
    path: Path, gpu: BadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ends, "STALLED_SECONDS", 0.02)
    monkeypatch.setattr(step_ends, "UNKNOWN_SECONDS", 0.02)
    with pytest.raises(DeviceStalled, match="did not end its work within"):
        async with asyncio.timeout(LIMIT), open_engine(config_of(path)) as engine:
            gpu._get("stream", stream_of(engine)).held = True
            reading = asyncio.create_task(read(engine))
            await asyncio.Event().wait()
    with pytest.raises(EngineClosed):
        await reading
    assert gpu.live == {}


@pytest.mark.parametrize("cache", [-1, 2], ids=["resident", "hybrid"])
async def test_closing_while_a_step_runs_waits_for_it(
    cache: int, path: Path, gpu: BadDriver
) -> None:
    async with open_engine(config_of(path, moe_expert_cache=cache)) as engine:
        stream = stream_of(engine)
        with gpu.hold(stream):
            reading = asyncio.create_task(read(engine))
            await launched(gpu)
            engine.close()
            with pytest.raises(EngineClosed):
                await reading
            closing = asyncio.create_task(engine.executor.close())
            await asyncio.wait([closing], timeout=0.02)
            assert not closing.done()
        await asyncio.wait_for(closing, LIMIT)
    assert gpu.live == {}


async def test_closing_while_workers_are_late_is_no_error(path: Path, gpu: BadDriver) -> None:
    async with open_engine(config_of(path, **HYBRID)) as engine:
        with gpu.hold(stream_of(engine)):
            impatient_after(gpu, 0)
            reading = asyncio.create_task(read(engine))
            await launched(gpu)
            engine.close()
            with pytest.raises(EngineClosed):
                await reading
    assert gpu.live == {}


async def test_a_file_truncated_under_pinned_experts_is_a_typed_error(
    path: Path, tmp_path: Path, gpu: BadDriver
) -> None:
    model = Path(shutil.copyfile(path, tmp_path / "model.gguf"))
    async with open_engine(config_of(model, **HYBRID)) as engine:
        assert await read(engine) == [0, 0, 0]
        assert gpu.live["registered"] > 2
        os.truncate(model, 1 << 16)
        with pytest.raises(CorruptModel, match=r"model\.gguf.*while it was open"):
            await read(engine)
    assert gpu.live == {}


def table_of(engine: Engine, gpu: BadDriver) -> tuple[Any, Any]:
    """Where the GPU takes experts from, and where the engine has put them."""
    [memory] = executor_of(engine)._parts.memory._parts
    expected = memory._store.table()  # type: ignore[attr-defined]
    table = gpu._span(memory._table, expected.nbytes).view(expected.dtype)
    return table.reshape(expected.shape), expected


@pytest.mark.parametrize("grows", [True, False])
async def test_a_resize_that_finds_no_memory_leaves_no_expert_behind(
    grows: bool, path: Path, gpu: BadDriver
) -> None:
    """At each of its allocations in turn: the GPU never looks where nothing is any more."""
    async with asyncio.timeout(LIMIT), open_engine(config_of(path, **HYBRID)) as engine:
        half = engine.describe()["expert_bytes"]
        whole = await engine.resize(None)
        [memory] = executor_of(engine)._parts.memory._parts
        few = (memory._planned.dense_bytes + memory._planned.settings.reserve_bytes + half) / 2**30
        small = await engine.resize(few)
        assert 0 < small < whole
        before, after = (few, None) if grows else (None, few)
        failed: list[int] = []
        for nth in range(100):
            await engine.resize(before)
            gpu.out_of_memory_at = gpu.n_allocating + nth
            try:
                await engine.resize(after)
            except (CudaError, PinningFailed):
                failed.append(engine.describe()["expert_bytes"])
            reached = gpu.n_allocating > gpu.out_of_memory_at
            gpu.out_of_memory_at = None
            table, expected = table_of(engine, gpu)
            assert (table == expected).all(), nth
            assert await read(engine) == [0, 0, 0]
            if not reached:
                break
        assert len(failed) > 3 and failed.count(0) >= len(failed) - 2
        assert await engine.resize(None) == whole
    assert gpu.live == {}
