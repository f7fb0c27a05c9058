"""Opening the GPU executor: what fits, what fails, why the CPU computes instead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.cuda import module as module_file
from runtime.cuda.driver import Driver, initialized
from runtime.cuda.module import CubinCache
from runtime.engine import placement
from runtime.engine.engine import Engine
from runtime.engine.gpu import captured_steps
from runtime.engine.gpu.captured_steps import CapturedStep, CapturedSteps
from runtime.engine.gpu.opening import open_gpu_executor
from runtime.engine.gpu.settings import MARGIN_BYTES, GPUSettings
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.errors import CorruptModel, DeviceError, DeviceUnavailable, OutOfDeviceMemory
from runtime.models import Model, open_model
from runtime.notices import Notices, Reason
from runtime.progress import Progress
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import Failure, FakeDriver
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETTINGS = {"n_ctx": 256, "max_sequences": 2, "max_step_tokens": 4, "exchange_rounds": 0}
N_FAILURES = 12
"""Allocating calls that fail, one at a time, spread over all of them."""
VARYING = 16
"""Calls fewer that there may be: not every thread that loads gets a piece."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("opening")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(directory / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with open_model(path) as model:
        yield model


def open_and_close(model: Model, fake: FakeDriver, cache: Path, **settings: Any) -> dict[str, Any]:
    """The facts of an executor that was opened on a thread of its own."""

    async def main() -> dict[str, Any]:
        executor = await asyncio.to_thread(
            open_gpu_executor,
            model,
            GPUSettings(**{**SETTINGS, **settings}),
            Progress(),
            driver=initialized(fake, "13.4.4"),
            cache=CubinCache(cache),
        )
        facts = executor.describe()
        await executor.close()
        return facts

    return asyncio.run(main())


def test_it_says_what_it_is(model: Model, tmp_path: Path) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    facts = open_and_close(model, fake, tmp_path)
    assert facts["device"] == "cuda"
    assert facts["gpu"] == "Fake GPU 0"
    assert facts["experts"] == "all on the GPU"
    assert facts["kv_bytes"] == facts["kv_pages"] * facts["kv_page_bytes"]
    assert facts["captured_graphs"] == 2  # what one sequence decodes by
    assert fake.live == {}


def test_every_failed_allocation_is_an_error_that_leaves_nothing(
    model: Model, tmp_path: Path
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    open_and_close(model, fake, tmp_path)  # which assembles
    fake.n_allocating = 0
    open_and_close(model, fake, tmp_path)
    for index in range(0, fake.n_allocating - VARYING, fake.n_allocating // N_FAILURES):
        fake.n_allocating, fake.out_of_memory_at = 0, index
        with pytest.raises(DeviceError):
            open_and_close(model, fake, tmp_path)
        assert fake.live == {}, index


def test_what_does_not_fit_is_said(model: Model, tmp_path: Path) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    with pytest.raises(DeviceUnavailable, match=r"do not fit the 0\.2 GiB"):
        open_and_close(model, fake, tmp_path, vram_limit=200 << 20)
    assert fake.live == {}


def test_experts_that_do_not_fit_are_cached(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    whole = open_and_close(model, fake, tmp_path)
    limit = whole["weights_bytes"] + whole["kv_bytes"] + whole["activation_bytes"]
    limit += MARGIN_BYTES + whole["expert_bytes"] // 2
    facts = open_and_close(model, fake, tmp_path, vram_limit=limit, n_threads=1)
    assert 0 < facts["expert_slots"] < 8
    assert fake.live == {}


def test_kernels_that_cannot_be_kept_are_named(model: Model, tmp_path: Path) -> None:
    notices = Notices()
    (tmp_path / "file").write_text("")
    open_and_close(model, FakeDriver(memory_bytes=1 << 30), tmp_path / "file", notices=notices)
    (notice,) = notices.all
    assert notice.reason is Reason.NOT_KEPT and "assembled kernels" in notice.text


def test_experts_make_room_for_the_first_graphs(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, capture = [True], CapturedSteps.of

    def of(steps: CapturedSteps, shape: StepShape) -> CapturedStep:
        if full.pop() if full else False:
            raise OutOfDeviceMemory("graph", 1, 0)
        return capture(steps, shape)

    monkeypatch.setattr(CapturedSteps, "of", of)
    notices = Notices()
    given = {"moe_expert_cache": 4, "n_threads": 1, "notices": notices}
    fake = FakeDriver(memory_bytes=1 << 30)
    facts = open_and_close(model, fake, tmp_path, **given)
    assert facts["captured_graphs"] == 2 and fake.live == {}
    assert any("MiB back" in notice.text for notice in notices.all)

    full[:] = [True] * 9
    with pytest.raises(DeviceError):
        open_and_close(model, fake, tmp_path, **given)
    assert fake.live == {}


def test_a_gpu_that_cannot_be_used_is_left_out_and_named(model: Model, tmp_path: Path) -> None:
    fake, notices = FakeDriver(memory_bytes=1 << 30), Notices()
    fake.n_devices, retain = 2, fake._cuDevicePrimaryCtxRetain

    def of_the_first(device: int) -> int:
        if device:
            raise Failure("OUT_OF_MEMORY")
        return retain(device)

    fake._cuDevicePrimaryCtxRetain = of_the_first  # type: ignore[method-assign]
    facts = open_and_close(model, fake, tmp_path, notices=notices)
    assert facts["gpu"] == "Fake GPU 0"
    (notice,) = notices.all
    assert notice.reason is Reason.GPU_LEFT_OUT and notice.text.startswith("GPU 1: ")


def test_parts_that_nobody_computes_are_obstacles(model: Model, tmp_path: Path) -> None:
    first, *others = model.spec.layers
    kind: Any = SimpleNamespace(linears=(), vectors=())
    unknown = replace(model.spec, layers=(replace(first, mixer=kind), *others))
    for spec, reason in (
        (unknown, "layers of the kind SimpleNamespace"),
        (replace(model.spec, n_stream=3), "3 streams of"),
    ):
        with pytest.raises(DeviceUnavailable, match=f"lack: {reason}"):
            changed = Model(model.file, spec)
            open_and_close(changed, FakeDriver(memory_bytes=1 << 30), tmp_path)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    """A machine with a fake GPU."""
    fake = FakeDriver(memory_bytes=1 << 30)

    def open_driver() -> Driver:
        return initialized(fake, "13.4.4")

    monkeypatch.setattr("runtime.cuda.driver.open_driver", open_driver)
    monkeypatch.setattr(module_file, "default_directory", lambda: tmp_path / "cubins")
    return fake


async def greedy(engine: Engine, n: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    return [token.id async for token in engine.generate([5, 70], params)]


async def test_the_engine_takes_the_gpu_and_says_the_cpus_tokens(
    path: Path, fake_gpu: FakeDriver
) -> None:
    config = {"model": path, "n_ctx": 256, "n_parallel": 2, "n_threads": 1}
    tokens = {}
    for device in ("auto", "cpu"):
        async with open_engine(EngineConfig(device=device, **config)) as engine:
            assert engine.describe()["device"] == ("cuda" if device == "auto" else "cpu")
            tokens[device] = await greedy(engine, 3)
    assert tokens["auto"] == tokens["cpu"]
    assert fake_gpu.live == {}


async def test_graphs_whose_arrays_outgrow_their_room_are_planned_anew(
    path: Path, fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=path, n_ctx=256, n_parallel=2, n_threads=1, device="cuda")
    tokens = []
    for n_bytes in (captured_steps.LEAST_CONSTANT_BYTES, 1):
        monkeypatch.setattr(captured_steps, "LEAST_CONSTANT_BYTES", n_bytes)
        async with open_engine(config) as engine:
            tokens.append(await greedy(engine, 2))
    assert tokens[0] == tokens[1]
    assert fake_gpu.live == {}


async def test_a_vocabulary_that_is_wrong_ends_an_opening_that_went_well(
    path: Path, fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Model) -> None:
        raise CorruptModel(model.path, "two tokens have the same text")

    monkeypatch.setattr(placement, "facts_of", wrong)
    for limit in (None, 0.01):  # the second one: the GPU cannot be used either
        config = EngineConfig(model=path, n_ctx=256, n_threads=1, device="cuda", vram_limit=limit)
        with pytest.raises(CorruptModel, match="same text"):
            async with open_engine(config):
                pass
        assert fake_gpu.live == {}


async def test_the_cpu_computes_where_the_gpu_cannot_and_says_why(
    tmp_path: Path, fake_gpu: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    path = TINY_MODELS["llama_dense"]().write(tmp_path / "model.gguf")
    config = EngineConfig(model=path, n_ctx=256, n_threads=1, vram_limit=0.01)
    caplog.set_level("INFO")
    async with open_engine(config) as engine:
        assert engine.describe()["device"] == "cpu"
    assert "do not fit the 0.0 GiB of the GPU" in caplog.text
    assert fake_gpu.live == {}
    with pytest.raises(DeviceUnavailable, match="do not fit"):
        async with open_engine(EngineConfig(model=path, n_ctx=256, vram_limit=0.01, device="cuda")):
            pass
