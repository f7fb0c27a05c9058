"""Tokens that the GPU executor chooses, over the interpreter: those of the host's sampler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.gpu.step_io import RING
from runtime.config import EngineConfig
from runtime.cuda import module as module_file
from runtime.cuda.driver import initialized
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.engine import Engine
from runtime.engine.gpu import step_shape
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.joined_parts import kept
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.engine.step import F32, Step, StepKind
from runtime.errors import EngineBug
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import executor_of, step_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.fake_engine import ids, read

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_VOCAB = 96
PROMPTS = np.random.default_rng(3).integers(0, N_VOCAB, (4, 3)).astype(np.int32)

CHAINS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}] * 3,
    "seeded": [{"seed": 5, "temperature": 1.5}, {"seed": 6, "top_k": 9, "min_p": 0}, {"seed": 7}],
    "edited": [
        {"temperature": 0, "repeat_penalty": 1.5},
        {"seed": 2, "logit_bias": {7: -30.0, 8: 3.0}},
        {"temperature": 0},
    ],
    "drawn on the host": [{"seed": 3, "typical_p": 0.5}, {"seed": 4, "dynatemp_range": 0.3}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("sampling") / "model.gguf"
    with open_model(BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(path)) as model:
        yield model


@pytest.fixture
async def gpu(model: Model, tmp_path: Path) -> AsyncIterator[GPUExecutor]:
    """An executor that has read the prompts, sequence i in row i."""
    async with executor_of(model, tmp_path) as executor:
        for row, prompt in enumerate(PROMPTS):
            await executor.run(step_of(executor, StepKind.PREFILL, [(row, prompt[:2], 0)], [1]))
        yield executor


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    """A machine with a fake GPU."""
    fake = FakeDriver(memory_bytes=1 << 30)
    monkeypatch.setattr("runtime.cuda.driver.open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(module_file, "default_directory", lambda: tmp_path / "cubins")
    return fake


def decode_step(gpu: GPUExecutor, n: int) -> Step:
    """The last tokens of the first n prompts."""
    parts = [(row, PROMPTS[row, 2:], 2) for row in range(n)]
    return step_of(gpu, StepKind.DECODE, parts)


def samplers_of(params: list[dict[str, Any]]) -> list[CandidateSampler]:
    vocabulary = SamplingVocabulary(N_VOCAB)
    return [
        CandidateSampler(SamplingParams(**fields), vocabulary, PROMPTS[row].tolist())
        for row, fields in enumerate(params)
    ]


def sampled(gpu: GPUExecutor, step: Step, samplers: list[CandidateSampler]) -> Step:
    works = [one.device_work(int(step.positions[row]) + 1) for row, one in enumerate(samplers)]
    sampled = replace(step, sampling=tuple(work for work in works if work is not None))
    assert gpu.samples(sampled)
    return sampled


async def logits_of(gpu: GPUExecutor, step: Step) -> F32:
    return (await gpu.run(step)).logits.copy()


@pytest.mark.parametrize("name", CHAINS)
async def test_tokens_are_those_of_the_hosts_sampler(name: str, gpu: GPUExecutor) -> None:
    samplers = samplers_of(CHAINS[name])
    step = decode_step(gpu, len(samplers))
    logits = await logits_of(gpu, step)
    expected = [one.choose(logits[row], 3).id for row, one in enumerate(samplers)]
    result = await gpu.run(sampled(gpu, step, samplers))
    chosen = result.chosen
    assert chosen is not None
    assert result.logits.size == 0
    assert (chosen.ids is None) == (name == "greedy")
    for row, one in enumerate(samplers):
        work = one.device_work(3)
        assert work is not None
        if work.chain is not None:
            assert chosen.tokens[row] == expected[row]
        if chosen.ids is not None and chosen.values is not None:
            n = min(work.k, N_VOCAB)
            ids, values = chosen.ids[row, :n], chosen.values[row, :n]
            assert one.choose_among(ids, values, 3).id == expected[row]


async def test_a_token_does_not_depend_on_who_is_beside(gpu: GPUExecutor) -> None:
    together = samplers_of(CHAINS["edited"])
    step = decode_step(gpu, 3)
    chosen = (await gpu.run(sampled(gpu, step, together))).chosen
    assert chosen is not None
    for row in range(3):
        alone = step_of(gpu, StepKind.DECODE, [(row, PROMPTS[row, 2:], 2)])
        result = await gpu.run(sampled(gpu, alone, together[row : row + 1]))
        assert result.chosen is not None
        assert result.chosen.tokens == [chosen.tokens[row]]


@pytest.mark.parametrize("name", CHAINS)
async def test_more_tokens_than_a_class_holds_are_chosen_in_parts(
    name: str, gpu: GPUExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part is in flight; nothing begins before its tokens are known."""
    samplers = samplers_of(CHAINS[name])
    step = sampled(gpu, decode_step(gpu, len(samplers)), samplers)
    together = kept(await gpu.run(step)).chosen
    assert together is not None and step.sampling is not None
    monkeypatch.setattr(step_shape, "LARGEST_DECODE", len(samplers) - 1)
    flight = await gpu.begin(step)
    assert not gpu.samples(replace(following(gpu, [0], 3), sampling=step.sampling[:1]))
    assert not gpu.samples(replace(step, follows=True))
    chosen = (await flight.result()).chosen
    assert chosen is not None
    assert chosen.tokens == together.tokens
    for row, one in enumerate(samplers):
        work = step.sampling[row]
        assert one.choice_of(work, chosen, row, 3) == one.choice_of(work, together, row, 3)


async def test_a_token_does_not_depend_on_the_steps_before(gpu: GPUExecutor) -> None:
    """Every block of the ring has held a step of another layout, with edits everywhere."""
    biases = {token: 1.0 for token in range(50, N_VOCAB)}
    alone = samplers_of([{"seed": 1, "presence_penalty": 0.1, "logit_bias": biases}])
    samplers = samplers_of([{"temperature": 0, "logit_bias": {1: 90.0}}] * 3)
    step = decode_step(gpu, 3)
    for _ in range(RING):
        await gpu.run(sampled(gpu, decode_step(gpu, 1), alone))
    for _ in range(RING):
        chosen = (await gpu.run(sampled(gpu, step, samplers))).chosen
        assert chosen is not None
        assert chosen.tokens == [1, 1, 1]


def following(gpu: GPUExecutor, rows: list[int], position: int) -> Step:
    """The tokens that the step before chooses for these outputs, which are sequences, at once."""
    parts = [(row, np.zeros(1, np.int32), position) for row in rows]
    step = step_of(gpu, StepKind.DECODE, parts)
    return replace(step, token_ids=np.array([-1 - row for row in rows], np.int32), follows=True)


@pytest.mark.parametrize("name", ["greedy", "seeded"])
async def test_a_step_begins_before_the_last_ones_tokens_are_known(
    name: str, gpu: GPUExecutor
) -> None:
    """Three steps, two of them in flight at once; then the same one by one, as text shows."""
    samplers = samplers_of(CHAINS[name])
    first = sampled(gpu, decode_step(gpu, 3), samplers)
    kept = [2, 0]  # the other one has ended
    rest = [samplers[row] for row in kept]
    second = sampled(gpu, following(gpu, kept, 3), rest)
    third = following(gpu, kept, 4)
    third = sampled(gpu, replace(third, token_ids=np.array([-1, -2], np.int32)), rest)
    flights = [await gpu.begin(first), await gpu.begin(second)]
    results = [await flights[0].result()]
    flights.append(await gpu.begin(third))
    results += [await flights[1].result(), await flights[2].result()]
    tokens = [result.chosen.tokens for result in results if result.chosen is not None]
    assert [len(part) for part in tokens] == [3, 2, 2]

    logits = await logits_of(gpu, decode_step(gpu, 3))
    assert tokens[0] == [one.choose(logits[row], 3).id for row, one in enumerate(samplers)]
    previous = [tokens[0][row] for row in kept]
    for position in (3, 4):
        parts = [
            (row, np.array([token], np.int32), position)
            for row, token in zip(kept, previous, strict=True)
        ]
        logits = await logits_of(gpu, step_of(gpu, StepKind.DECODE, parts))
        previous = [one.choose(logits[i], position + 1).id for i, one in enumerate(rest)]
        assert tokens[position - 2] == previous


async def test_nothing_follows_a_step_that_chose_no_tokens(gpu: GPUExecutor) -> None:
    samplers = samplers_of(CHAINS["greedy"])
    await gpu.run(decode_step(gpu, 2))
    with pytest.raises(EngineBug, match="does not exist"):
        await gpu.begin(sampled(gpu, following(gpu, [0, 1], 3), samplers[:2]))
    await gpu.run(sampled(gpu, decode_step(gpu, 2), samplers[:2]))
    with pytest.raises(EngineBug, match="does not exist"):
        await gpu.begin(sampled(gpu, following(gpu, [0, 2], 3), samplers[:2]))


async def test_two_steps_wait_in_the_stream_and_results_outlive_the_next_step(
    model: Model, tmp_path: Path
) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    async with executor_of(model, tmp_path, fake) as gpu:
        (sampler,) = samplers_of(CHAINS["greedy"][:1])
        first = sampled(gpu, decode_step(gpu, 1), [sampler])
        expected = (await gpu.run(first)).chosen
        second = sampled(gpu, following(gpu, [0], 3), [sampler])
        with fake.hold(gpu._parts.stream.handle):
            flights = [await gpu.begin(first), await gpu.begin(second)]
            third = asyncio.create_task(gpu.begin(second))
            await asyncio.sleep(0)
            assert not third.done()
        # Both have ended by now: what the first one gave is still there.
        assert (await flights[0].result()).chosen == expected
        assert (await (await third).result()).chosen is not None


@pytest.mark.parametrize("most", [128, 1])
async def test_the_engine_runs_ahead_and_says_the_cpus_tokens(
    most: int, model: Model, tmp_path: Path, fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers at once, one greedy and one drawn; one of them ends first. Where a class holds a
    token, steps of both are performed in parts, and the other one runs ahead again alone."""
    monkeypatch.setattr(step_shape, "LARGEST_DECODE", most)
    begun: list[bool] = []
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(seed=3, temperature=1.4, max_tokens=6),
    ]

    async def answers(engine: Engine) -> list[list[int | None]]:
        prompts = [PROMPTS[0].tolist(), PROMPTS[1].tolist()]
        tokens = await asyncio.gather(*map(read, [engine] * 2, prompts, params))
        return [ids(part) for part in tokens]

    path = model.file.path
    async with open_engine(
        EngineConfig(model=path, n_ctx=256, n_parallel=2, device="cuda")
    ) as engine:
        executor = engine.executor
        assert isinstance(executor, GPUExecutor)
        begin = executor.begin

        async def spied(step: Step) -> Any:
            begun.append(step.follows)
            return await begin(step)

        executor.begin = spied  # type: ignore[method-assign]
        on_the_gpu = await answers(engine)
    async with open_engine(
        EngineConfig(model=path, n_ctx=256, n_parallel=2, device="cpu")
    ) as engine:
        assert on_the_gpu == await answers(engine)
    assert [len(part) for part in on_the_gpu] == [3, 6]
    assert begun.count(True) >= (3 if most > 1 else 2)
    assert fake_gpu.live == {}
