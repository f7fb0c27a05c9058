"""Layers split over two GPUs: the bits of one, and typed errors where the two lose each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu import links
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.share import parts_of, split_parts
from runtime.engine.step import F32, StepKind
from runtime.errors import (
    ConfigError,
    CudaError,
    DeviceUnavailable,
    EngineBug,
    HandOverStalled,
)
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import Failure, FakeDriver
from tests.support.tiny_recurrent_models import glm5_next

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_PROMPT, N_DECODED = 5, 1
ALL = 8
"""Experts of a layer."""


def gpus(n: int = 2, *, peers: bool = True) -> FakeDriver:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.n_devices, fake.peer_access = n, peers
    fake.host = lambda: time.sleep(0)
    return fake


@asynccontextmanager
async def split_over(
    model: Model, tmp_path: Path, fake: FakeDriver, **settings: Any
) -> AsyncIterator[GPUExecutor]:
    chosen = {"split": True, "n_threads": 2, "exchange_rounds": 0, "max_step_tokens": 40}
    chosen |= settings
    async with executor_of(model, tmp_path, fake, **chosen) as executor:
        yield executor


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(directory / "model.gguf")


async def answers(executor: GPUExecutor) -> F32:
    """Logits of a prompt's last token, in two chunks, of generated ones and of a batch."""
    rows = []
    for start, end in ((0, 3), (3, N_PROMPT)):
        part = [(1, TOKENS[start:end], start)]
        step = step_of(executor, StepKind.PREFILL, part, [end - start - 1])
        rows.append(await logits_of(executor, step))
    for position in range(N_PROMPT, N_PROMPT + N_DECODED):
        token = np.array([rows[-1][-1].argmax()], np.int32)
        step = step_of(executor, StepKind.DECODE, [(1, token, position)])
        rows.append(await logits_of(executor, step))
    pair = [(1, TOKENS[:1], N_PROMPT + N_DECODED), (2, TOKENS[5:6], 0)]
    rows.append(await logits_of(executor, step_of(executor, StepKind.DECODE, pair)))
    return np.concatenate(rows)


async def test_two_have_the_bits_of_one(path: Path, tmp_path: Path) -> None:
    """Through each other's memory, through the host's, and with experts that the CPU computes."""
    with open_model(path) as model:
        async with split_over(model, tmp_path, gpus(1)) as executor:
            expected = await answers(executor)
        for peers, slots in ((True, ALL), (False, ALL), (True, 3)):
            fake = gpus(peers=peers)
            async with split_over(model, tmp_path, fake, moe_expert_cache=slots) as executor:
                logits = await answers(executor)
                facts = executor.describe()
            assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32)), (peers, slots)
            assert facts["gpu"] == "Fake GPU 0, Fake GPU 1"
            assert facts["direct_hand_over"] == peers
            missed: Any = facts.get("expert_cpu_misses", 0)
            assert (missed > 0) == (slots < ALL)


def streams_of(executor: GPUExecutor) -> list[Any]:
    """Of each GPU, as the driver knows them."""
    stream: Any = executor._parts.stream
    return [part.handle for part in stream.streams]


async def test_a_gpu_waits_for_the_one_before(path: Path, tmp_path: Path) -> None:
    fake = gpus()
    with open_model(path) as model:
        async with split_over(model, tmp_path, fake) as executor:
            step = step_of(executor, StepKind.DECODE, [(1, TOKENS[:1], 0)])
            expected = await logits_of(executor, step)
            first, _ = streams_of(executor)
            looks = 0

            def host() -> None:
                nonlocal looks
                looks += 1
                if looks == 20:
                    fake.release(first)

            fake.host = host
            with fake.hold(first):
                assert np.array_equal(await logits_of(executor, step), expected)
            assert looks >= 20


async def test_a_gpu_does_not_wait_for_ever(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU gives up; what it then reports is an error, and the next step is whole."""
    monkeypatch.setattr(links, "PATIENCE_NS", 2_000)
    fake = gpus()
    with open_model(path) as model:
        async with split_over(model, tmp_path, fake) as executor:
            step = step_of(executor, StepKind.DECODE, [(1, TOKENS[:1], 0)])
            expected = await logits_of(executor, step)
            first, _ = streams_of(executor)
            with pytest.raises(HandOverStalled, match="did not get the step from GPU 0"):
                with fake.hold(first):
                    running = asyncio.create_task(executor.run(step))
                    await asyncio.sleep(0)
                await running
            for _ in range(3):
                assert np.array_equal(await logits_of(executor, step), expected)


async def test_a_launch_that_fails_on_one_gpu_is_the_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = gpus()
    with open_model(path) as model:
        async with split_over(model, tmp_path, fake) as executor:
            step = step_of(executor, StepKind.DECODE, [(1, TOKENS[:1], 0)])
            await logits_of(executor, step)
            launched = fake._cuGraphLaunch

            def launch(hGraphExec: Any, hStream: Any) -> None:
                if hStream == streams_of(executor)[1]:
                    raise Failure("OUT_OF_MEMORY")
                launched(hGraphExec, hStream)

            monkeypatch.setattr(fake, "_cuGraphLaunch", launch)
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                await executor.run(step)
            monkeypatch.undo()
            with pytest.raises(EngineBug, match="at different steps"):
                await executor.run(step)


async def test_pages_of_both_are_saved_copied_and_loaded(path: Path, tmp_path: Path) -> None:
    with open_model(path) as model:
        async with split_over(model, tmp_path, gpus()) as gpu:
            await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:2], 0)], [1]))
            last = [(1, TOKENS[2:3], 2)]
            expected = await logits_of(gpu, step_of(gpu, StepKind.DECODE, last))
            image = await asyncio.to_thread(gpu.save_pages, [1, 5])
            assert len(image) == 2 * gpu.describe()["kv_page_bytes"]  # type: ignore[operator]
            await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(1, TOKENS[3:5], 0)], [1]))
            await asyncio.to_thread(gpu.load_pages, [2, 6], image)
            elsewhere = step_of(gpu, StepKind.DECODE, [(2, TOKENS[2:3], 2)])
            assert np.array_equal(await logits_of(gpu, elsewhere), expected)
            moved = step_of(gpu, StepKind.DECODE, [(3, TOKENS[2:3], 2)])
            moved = replace(moved, page_copies=((2, 3), (6, 7)))
            assert np.array_equal(await logits_of(gpu, moved), expected)
            with pytest.raises(ValueError, match="is not 1 pages"):
                await asyncio.to_thread(gpu.load_pages, [2], image)


@pytest.mark.parametrize(
    ("settings", "gpu"),
    [
        ({"split": False, "main_gpu": 1}, "Fake GPU 1"),
        ({"tensor_split": (0.0, 1.0)}, "Fake GPU 1"),
        ({"tensor_split": (1.0, 0.0, 1.0)}, "Fake GPU 0, Fake GPU 2"),
        ({}, "Fake GPU 0, Fake GPU 2"),
    ],
)
async def test_which_gpus_are_taken(
    path: Path, settings: dict[str, Any], gpu: str, tmp_path: Path
) -> None:
    fake = gpus(3)
    if not settings:
        fake.device_bytes[1] = 1 << 20  # too little for anything
    with open_model(path) as model:
        async with split_over(model, tmp_path, fake, max_step_tokens=1, **settings) as executor:
            assert executor.describe()["gpu"] == gpu


async def test_gpus_that_are_not_there_are_said(path: Path, tmp_path: Path) -> None:
    with open_model(path) as model:
        with pytest.raises(ConfigError, match="shows 2 GPUs"):
            async with split_over(model, tmp_path, gpus(), tensor_split=(1.0, 0.0, 2.0)):
                pass
        with pytest.raises(DeviceUnavailable, match="no GPU 2"):
            async with split_over(model, tmp_path, gpus(), split=False, main_gpu=2):
                pass


@pytest.mark.parametrize(
    ("sizes", "ends", "room", "counts"),
    [
        ([1] * 8, (0, 0), [1.0, 1.0], [4, 4]),
        ([1] * 8, (0, 4), [1.0, 1.0], [6, 2]),
        ([1] * 8, (0, 0), [3.0, 1.0], [6, 2]),
        ([1] * 3, (9, 0), [1.0, 1.0, 1.0], [1, 1, 1]),
        ([1] * 3, (0, 9), [1.0, 1.0, 1.0], [1, 1, 1]),
        ([5, 1, 1, 1], (0, 0), [1.0, 1.0], [1, 3]),
    ],
)
def test_layers_follow_the_room(
    sizes: list[int], ends: tuple[int, int], room: list[float], counts: list[int]
) -> None:
    assert split_parts(sizes, ends, room) == counts


@pytest.mark.parametrize(
    ("kept", "parts"),
    [(slice(3, 6), [1, 2]), (slice(0, 6), [1, 1, 1, 1, 2]), (slice(0, 4), [1] * 4)],
)
def test_layers_that_read_one_choice_stay_together(
    kept: slice, parts: list[int], tmp_path: Path
) -> None:
    with open_model(glm5_next().write(tmp_path / "model.gguf")) as model:
        assert parts_of(replace(model.spec, layers=model.spec.layers[kept])) == parts


async def test_what_an_indexer_chose_is_read_on_its_gpu(tmp_path: Path) -> None:
    """Layer 5 reads what layer 4 chose; by their bytes, the cut would be between the two."""
    tiny = glm5_next()
    tiny.set(expert_used_count=8, attention__indexer__top_k=4)
    logits = []
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        model.spec = replace(model.spec, layers=model.spec.layers[3:6])
        for room in ((1.0,), (1.0, 0.4)):
            fake = gpus(len(room))
            async with split_over(model, tmp_path, fake, tensor_split=room) as executor:
                for start, end in ((0, 10), (10, 11)):
                    kind = StepKind.DECODE if start else StepKind.PREFILL
                    step = step_of(executor, kind, [(1, TOKENS[start:end], start)])
                    logits.append(await logits_of(executor, step))
                assert str(executor.describe()["gpu"]).count("Fake") == len(room)
    assert np.array_equal(logits[2], logits[0]) and np.array_equal(logits[3], logits[1])


async def test_graphs_are_given_back_on_both(path: Path, tmp_path: Path) -> None:
    with open_model(path) as model:
        async with split_over(model, tmp_path, gpus()) as executor:
            steps = executor._parts.steps
            made = [step.shape for step in steps.all()]
            steps.drop(made[1:])
            assert [step.shape for step in steps.all()] == made[:1]
            split: Any = steps
            assert [len(own) for own in split._steps] == [1, 1]
            assert steps.of(made[-1]).shape == made[-1] and len(steps) == 2
