"""Models with recurrent layers: states that follow their sequences, and what is read again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import runtime
from runtime.engine import state_cache
from tests.support.fake_engine import GREEDY, fake, ids, read
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.usefixtures("no_task_is_left")

LONG = [i % 96 for i in range(0, 300, 3)]
PARAMS = GREEDY(max_tokens=12, ignore_eos=True)
DEVICES = ["fake", "cpu"]
CASES = [("qwen35", "cpu"), ("qwen4exp", "fake"), ("qwen4exp", "cpu"), ("glm5_next", "cpu")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recurrent")
    return {
        name: TINY_MODELS[name]().write(folder / f"{name}.gguf")
        for name in ("qwen35", "qwen4exp", "glm5_next")
    }


@pytest.fixture
def path(paths: dict[str, Path]) -> Path:
    return paths["qwen35"]


@pytest.fixture(autouse=True)
def _snapshots_of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "WORTHWHILE", 16)
    monkeypatch.setattr(state_cache, "SPACING", 64)


@asynccontextmanager
async def engine_of(path: Path, device: str, **settings: object) -> AsyncIterator[runtime.Engine]:
    chosen = {"n_ctx": 1024, "n_batch": 40, "n_threads": 2, **settings}
    config = runtime.EngineConfig(device=device, model=str(path), **chosen)
    async with runtime.open_engine(config) as engine:
        yield engine


async def alone(path: Path, device: str, prompt: list[int]) -> list[int | None]:
    """What a fresh engine answers."""
    async with engine_of(path, device) as engine:
        return ids(await read(engine, prompt, PARAMS))


@pytest.mark.parametrize("device", DEVICES)
async def test_a_follow_up_begins_from_the_end_of_the_turn_before(path: Path, device: str) -> None:
    async with engine_of(path, device) as engine:
        first = await read(engine, LONG, PARAMS)
        follow_up = [*LONG, *(i for i in ids(first) if i is not None), 5, 6, 7]
        second = await read(engine, follow_up, PARAMS)
        third = await read(engine, follow_up, PARAMS)
    assert first[0].n_cached == 0
    # All but the last generated token, which no step has read, and the three new ones.
    assert second[0].n_cached == len(follow_up) - 4
    assert 0 < third[0].n_cached < len(follow_up)
    assert ids(second) == ids(third)
    if device == "fake":  # generated tokens read again as a prompt may differ in bits elsewhere
        assert ids(second) == await alone(path, device, follow_up)


@pytest.mark.parametrize(("name", "device"), CASES)
async def test_the_same_prompt_is_read_from_its_last_snapshot(
    paths: dict[str, Path], name: str, device: str
) -> None:
    path = paths[name]
    async with engine_of(path, device) as engine:
        first = await read(engine, LONG, PARAMS)
        again = await read(engine, LONG, PARAMS)
        fresh = await read(engine, LONG, PARAMS, reuse_prefix=False)
        other = [*LONG[:70], *(token + 1 for token in LONG[70:90])]
        branched = await read(engine, other, PARAMS)
        page = engine.executor.limits.page_tokens
    assert ids(first) == ids(again) == ids(fresh)
    assert again[0].n_cached == 99 // page * page
    assert fresh[0].n_cached == 0
    assert branched[0].n_cached == 64, "the snapshot at a distance"
    assert ids(branched) == await alone(path, device, other)


@pytest.mark.parametrize(("name", "device"), CASES)
async def test_parallel_sequences_answer_as_if_alone(
    paths: dict[str, Path], name: str, device: str
) -> None:
    path = paths[name]
    prompts = [LONG[start : start + n] for start, n in ((0, 3), (10, 40), (20, 70), (7, 1))]
    async with engine_of(path, device) as engine:
        together = await asyncio.gather(*(read(engine, prompt, PARAMS) for prompt in prompts))
    for prompt, tokens in zip(prompts, together, strict=True):
        assert ids(tokens) == await alone(path, device, prompt)


@pytest.mark.parametrize(("name", "device"), CASES)
async def test_preempted_sequences_come_back_with_their_states(
    paths: dict[str, Path], name: str, device: str
) -> None:
    path = paths[name]
    params = GREEDY(max_tokens=60, ignore_eos=True)
    prompts = [[(20 * n + i) % 96 for i in range(25)] for n in range(4)]
    async with engine_of(path, device, n_ctx=128, n_batch=16) as engine:
        answers = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
        statistics = engine.statistics()
    assert statistics.counters.preemptions > 0
    assert statistics.counters.prompt_tokens == 4 * 25, "nothing was computed twice"
    for prompt, tokens in zip(prompts, answers, strict=True):
        async with engine_of(path, device, n_ctx=128, n_batch=16) as engine:
            assert ids(tokens) == ids(await read(engine, prompt, params))


async def test_several_completions_share_the_prompt_from_its_snapshot(path: Path) -> None:
    params = runtime.SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    async with engine_of(path, "fake") as engine:
        tokens = await read(engine, LONG, params, n=3)
        prompt_tokens = engine.statistics().counters.prompt_tokens
    assert prompt_tokens == len(LONG) + 2 * (len(LONG) - 96)
    for index in range(3):
        seed = runtime.SamplingParams(seed=3 + index, max_tokens=10, ignore_eos=True)
        async with engine_of(path, "fake") as engine:
            assert ids(tokens, index) == ids(await read(engine, LONG, seed))


async def test_a_cancelled_sequence_leaves_what_it_has_read(path: Path) -> None:
    async with engine_of(path, "fake") as engine:
        answer = engine.generate(LONG, PARAMS)
        await anext(answer)
        await answer.aclose()
        follow_up = await read(engine, LONG, PARAMS)
    assert follow_up[0].n_cached >= 96
    assert ids(follow_up) == await alone(path, "fake", LONG)


async def test_a_failed_step_leaves_no_snapshot(path: Path) -> None:
    async with engine_of(path, "fake") as engine:
        fake(engine).fail_when(lambda step: 100 in step.positions)
        with pytest.raises(runtime.ComputeError):
            await read(engine, LONG, PARAMS)
        fake(engine).fail_when(None)
        again = await read(engine, LONG, PARAMS)
    assert again[0].n_cached == 0
    assert ids(again) == await alone(path, "fake", LONG)


@pytest.mark.parametrize("device", DEVICES)
async def test_a_saved_slot_brings_its_state(path: Path, device: str) -> None:
    async with engine_of(path, device) as engine:
        first = await read(engine, LONG, PARAMS)
        image, n_saved = await engine.save_slot(first[-1].slot)
        follow_up = [*LONG, *(i for i in ids(first) if i is not None), 5]
        expected = ids(await read(engine, follow_up, PARAMS))
    async with engine_of(path, device) as engine:
        assert await engine.restore_slot(2, image) == n_saved
        again = await read(engine, follow_up, PARAMS)
        assert again[0].n_cached == n_saved == len(follow_up) - 2
        assert ids(again) == expected


async def test_states_are_accounted_for(path: Path) -> None:
    async with engine_of(path, "cpu", n_parallel=2) as engine:
        facts = engine.describe()
    matrices, taps = 6 * 16 * 16, 3 * (2 * 2 * 16 + 6 * 16)
    assert facts["state_slot_bytes"] == 3 * 4 * (matrices + taps)
    assert facts["state_bytes"] == facts["state_slot_bytes"] * facts["state_slots"]
    assert facts["state_slots"] > 2
    async with engine_of(path, "cpu", n_parallel=2, n_snapshots=3) as engine:
        assert engine.describe()["state_slots"] == 2 + 2 * 3
    async with engine_of(path, "cpu", n_snapshots=0) as engine:
        first = await read(engine, LONG, PARAMS)
        again = await read(engine, LONG, PARAMS)
    assert again[0].n_cached == 0
    assert ids(first) == ids(again)


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_requests_answers_as_if_alone(paths: dict[str, Path], seed: int) -> None:
    """Branching conversations, cancelled answers and too few pages, with states that are checked
    against every token by the fake device."""
    rng, path = random.Random(seed), paths["qwen4exp"]
    texts = [[rng.randrange(96) for _ in range(60)] for _ in range(2)]
    expected: dict[tuple[int, ...], list[int | None]] = {}

    async def ask(engine: runtime.Engine, delay: int) -> None:
        for _ in range(delay):
            await asyncio.sleep(0)
        prompt = texts[rng.randrange(2)][: rng.randrange(1, 40)]
        prompt = prompt + [rng.randrange(96) for _ in range(rng.randrange(1, 12))]
        n = rng.randrange(1, 70)
        params = GREEDY(max_tokens=n, ignore_eos=True)
        if rng.random() < 0.3:
            answer = engine.generate(prompt, params)
            await anext(answer)
            await answer.aclose()
            return
        answers.append((tuple(prompt), ids(await read(engine, prompt, params))))

    answers: list[tuple[tuple[int, ...], list[int | None]]] = []
    async with engine_of(path, "fake", n_ctx=128, n_batch=24) as engine:
        await asyncio.gather(*(ask(engine, rng.randrange(200)) for _ in range(40)))
        statistics = engine.statistics()
    assert statistics.counters.preemptions > 0
    assert statistics.counters.prompt_tokens_cached > 0
    async with engine_of(path, "fake") as engine:
        for prompt, answer in answers:
            if prompt not in expected:
                params = GREEDY(max_tokens=70, ignore_eos=True)
                tokens = await read(engine, list(prompt), params, reuse_prefix=False)
                expected[prompt] = ids(tokens)
            assert answer == expected[prompt][: len(answer)]
