"""The GPU executor over the interpreter: the CPU's logits, whatever the batch and the cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.cuda.driver import initialized
from runtime.cuda.module import CubinCache
from runtime.engine.executor import Executor
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.opening import open_gpu_executor
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.step import F32, Step, StepKind
from runtime.errors import ComputeError, DeviceLost, EngineBug, EngineClosed
from runtime.models import Model, open_model
from runtime.progress import Progress
from tests.engine.test_cpu_executor import executor_of as cpu_executor_of
from tests.engine.test_cpu_executor import step_of as cpu_step_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver
from tests.support.golden import golden_case
from tests.support.tiny_models import TINY_MODELS, TinyModel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = 1e-4
"""Of the largest logit."""

TOKENS = np.random.default_rng(6).integers(0, 96, 40).astype(np.int32)
Parts = list[tuple[int, NDArray[np.int32], int]]


def step_of(executor: Any, kind: StepKind, parts: Parts, outputs: list[int] | None = None) -> Step:
    """As for the CPU's tests: sequence s owns every 4th page from s."""
    return cpu_step_of(executor, kind, parts, outputs)


@asynccontextmanager
async def executor_of(
    model: Model, tmp_path: Path, fake: FakeDriver | None = None, **settings: Any
) -> AsyncIterator[GPUExecutor]:
    """The executor on a fake driver; nothing of it is left at the end."""
    fake = fake or FakeDriver(memory_bytes=1 << 30)
    chosen = {
        "n_ctx": 512,
        "max_sequences": 4,
        "max_step_tokens": 128,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        **settings,
    }
    executor = await asyncio.to_thread(
        open_gpu_executor,
        model,
        GPUSettings(**chosen),
        Progress(),
        driver=initialized(fake, "13.4.4"),
        cache=CubinCache(tmp_path / "cubins"),
    )
    try:
        yield executor
    finally:
        await executor.close()
    assert fake.live == {}


async def logits_of(executor: Executor, step: Step) -> F32:
    return (await executor.run(step)).logits.copy()


def assert_close(logits: F32, expected: F32) -> None:
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, error


@pytest.mark.parametrize("name", ["llama", "llama_dense", "olmoe", "qwen2moe", "qwen3moe"])
async def test_golden_logits(name: str, tmp_path: Path) -> None:
    """Every kind of model in floats: norms, rope, biases, routers, shared experts, tied outputs."""
    case = golden_case(name, tmp_path)
    with open_model(case.path) as model:
        async with executor_of(model, tmp_path) as gpu:
            prompt = step_of(gpu, StepKind.PREFILL, [(1, case.tokens[:6], 0)])
            assert_close(await logits_of(gpu, prompt), case.logits[:6])
            token = step_of(gpu, StepKind.DECODE, [(1, case.tokens[6:7], 6)])
            assert_close(await logits_of(gpu, token), case.logits[6:7])


@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "IQ3_XXS", "MXFP4"])
async def test_block_formats_have_the_cpus_logits(fmt: str, tmp_path: Path) -> None:
    with open_model(BLOCK_MODELS["qwen2moe"](fmt, 1).write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path) as gpu, cpu_executor_of(model) as cpu:
            for step in (
                step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:4], 0)]),
                step_of(gpu, StepKind.DECODE, [(1, TOKENS[4:5], 4)]),
            ):
                assert_close(await logits_of(gpu, step), await logits_of(cpu, step))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """One layer, quick to interpret."""
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1)


async def test_bits_depend_neither_on_the_cut_nor_on_the_batch(
    small: TinyModel, tmp_path: Path
) -> None:
    with open_model(small.write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path) as gpu, cpu_executor_of(model) as cpu:
            # Forty tokens at once are multiplied by tensor cores, a few are not.
            whole_step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS, 0)])
            whole = await logits_of(gpu, whole_step)
            assert_close(whole, await logits_of(cpu, whole_step))
            for start, end in ((0, 3), (3, 20)):
                part = step_of(gpu, StepKind.PREFILL, [(2, TOKENS[start:end], start)])
                assert np.array_equal(await logits_of(gpu, part), whole[start:end])
            together = step_of(
                gpu, StepKind.PREFILL, [(2, TOKENS[20:22], 20), (3, TOKENS[:4], 0)], [5, 1]
            )
            assert np.array_equal(await logits_of(gpu, together), whole[[3, 21]])
            # Generated tokens have an attention of their own: close to a prompt's, not the same.
            pair = [(2, TOKENS[22:23], 22), (3, TOKENS[4:5], 4)]
            decoded = await logits_of(gpu, step_of(gpu, StepKind.DECODE, pair))
            assert_close(decoded, whole[[22, 4]])
            for i in range(2):
                alone = step_of(gpu, StepKind.DECODE, pair[i : i + 1])
                assert np.array_equal(await logits_of(gpu, alone), decoded[i : i + 1])


async def test_pages_are_saved_copied_and_loaded(small: TinyModel, tmp_path: Path) -> None:
    with open_model(small.write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, cache_type_k="f16", cache_type_v="q8_0") as gpu:
            await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:34], 0)], [33]))
            last = [(1, TOKENS[34:35], 34)]
            expected = await logits_of(gpu, step_of(gpu, StepKind.DECODE, last))
            image = await asyncio.to_thread(gpu.save_pages, [1, 5])
            assert len(image) == 2 * gpu.describe()["kv_page_bytes"]  # type: ignore[operator]
            await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:3], 0)], [2]))
            await asyncio.to_thread(gpu.load_pages, [2, 6], image)
            elsewhere = step_of(gpu, StepKind.DECODE, [(2, TOKENS[34:35], 34)])
            assert np.array_equal(await logits_of(gpu, elsewhere), expected)
            moved = step_of(gpu, StepKind.DECODE, [(3, TOKENS[34:35], 34)])
            moved = replace(moved, page_copies=((2, 3), (6, 7)))
            assert np.array_equal(await logits_of(gpu, moved), expected)
            with pytest.raises(ValueError, match="is not 1 pages"):
                await asyncio.to_thread(gpu.load_pages, [2], image)


async def test_numbers_that_are_not_finite_are_an_error_and_the_executor_lives(
    tmp_path: Path,
) -> None:
    tiny = TINY_MODELS["llama_dense"]()
    index = next(i for i, t in enumerate(tiny.tensors) if t.name == "token_embd.weight")
    values = np.frombuffer(tiny.tensors[index].data, np.float32).copy()
    values[5 * 64] = np.nan
    tiny.tensors[index] = replace(tiny.tensors[index], data=values.tobytes())
    with open_model(tiny.write(tmp_path / "nan.gguf")) as model:
        async with executor_of(model, tmp_path) as gpu:
            good = step_of(gpu, StepKind.PREFILL, [(1, np.array([1, 2, 3], np.int32), 0)], [2])
            with pytest.raises(ComputeError, match=r"outputs \[0\]"):
                await logits_of(gpu, good)  # token 5 is a row of the tied output matrix


async def test_a_cancelled_step_ends_before_the_next_begins(
    small: TinyModel, tmp_path: Path
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    with open_model(small.write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, fake) as gpu:
            step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:2], 0)])
            expected = await logits_of(gpu, step)
            with fake.hold(gpu._parts.stream.handle):
                cancelled = asyncio.create_task(gpu.run(step))
                await asyncio.sleep(0)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                with pytest.raises(EngineBug, match="while a step runs"):
                    gpu.save_pages([1])
            assert np.array_equal(await logits_of(gpu, step), expected)
        with pytest.raises(EngineClosed):
            await gpu.run(step)


async def test_a_lost_device_is_a_typed_error(small: TinyModel, tmp_path: Path) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    with open_model(small.write(tmp_path / "model.gguf")) as model, pytest.raises(DeviceLost):
        async with executor_of(model, tmp_path, fake) as gpu:
            step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:2], 0)])
            with fake.hold(gpu._parts.stream.handle):
                running = asyncio.create_task(gpu.run(step))
                await asyncio.sleep(0)
                fake.lost = CUresult["CUDA_ERROR_ILLEGAL_ADDRESS"]
                await running


async def test_steps_beyond_the_limits_are_refused(small: TinyModel, tmp_path: Path) -> None:
    with open_model(small.write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, max_step_tokens=4) as gpu:
            tokens = TOKENS[:5]
            with pytest.raises(EngineBug, match="5 tokens"):
                await gpu.run(step_of(gpu, StepKind.PREFILL, [(0, tokens, 0)]))
            with pytest.raises(EngineBug, match="does not exist"):
                beyond = np.array([96], np.int32)
                await gpu.run(step_of(gpu, StepKind.DECODE, [(0, beyond, 0)]))
            for page in (0, 1):
                step = step_of(gpu, StepKind.DECODE, [(0, tokens[:1], 32 * page)])
                step.page_tables[0, page] = -1
                with pytest.raises(EngineBug, match="no page"):
                    await gpu.run(step)
