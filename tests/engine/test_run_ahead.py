"""Steps that begin before the tokens of the last one are known: the text is what it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.engine import fake_executor
from tests.support.ahead_executor import AheadExecutor
from tests.support.fake_engine import GREEDY, ids, read, text

pytestmark = pytest.mark.usefixtures("no_task_is_left")

CONFIG = runtime.EngineConfig(device="fake", n_ctx=256, n_batch=32)
TIGHT = runtime.EngineConfig(device="fake", n_ctx=96, n_batch=32)
"""Answers have to leave their pages to each other."""

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 4, "temperature": 1.2},
    "biased": {"seed": 4, "logit_bias": {101: 2.0}},
    "penalties": {"seed": 4, "repeat_penalty": 1.4},
    "drawn by the host": {"seed": 4, "typical_p": 0.7},
    "whole rows": {"seed": 4, "top_k": 0},
}
AHEAD = ("greedy", "seeded", "biased")


@asynccontextmanager
async def ahead_engine(
    monkeypatch: pytest.MonkeyPatch, config: runtime.EngineConfig = CONFIG
) -> AsyncIterator[tuple[runtime.Engine, AheadExecutor]]:
    with monkeypatch.context() as patch:
        patch.setattr(fake_executor, "FakeExecutor", AheadExecutor)
        async with runtime.open_engine(config) as engine:
            assert isinstance(engine.executor, AheadExecutor)
            yield engine, engine.executor
            await settled(engine)
            assert not engine.executor._flights


async def settled(engine: runtime.Engine) -> None:
    """Return when nothing is in flight."""

    async def nothing() -> None:
        pass

    await engine._steps.between_steps.result_of(nothing)


async def plain(prompt: str | list[int], params: runtime.SamplingParams, **options: Any) -> Any:
    """What an engine answers whose executor only gives logits."""
    async with runtime.open_engine(CONFIG) as engine:
        return await read(engine, prompt, params, **options)


@pytest.mark.parametrize("name", PARAMS)
async def test_the_text_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = runtime.SamplingParams(max_tokens=24, **PARAMS[name])
    expected = await plain("Hello", params)
    async with ahead_engine(monkeypatch) as (engine, executor):
        tokens = await read(engine, "Hello", params)
        counters = engine.statistics().counters
    assert ids(tokens) == ids(expected)
    assert text(tokens) == text(expected)
    assert tokens[-1].finish_reason == expected[-1].finish_reason
    assert (executor.n_ahead > 0) == (name in AHEAD)
    assert (executor.n_sampled > 0) == (name != "whole rows")
    assert counters.predicted_tokens == len(tokens)


async def test_a_limit_leaves_no_surplus_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ahead_engine(monkeypatch) as (engine, executor):
        await read(engine, "Hello", GREEDY(max_tokens=5, ignore_eos=True))
        assert executor.n_steps == 5  # the prompt, which gives the first token, and four more
        assert executor.n_ahead == 3


@pytest.mark.parametrize("stop", [{"stop": ("e",)}, {}])
async def test_what_follows_an_end_is_thrown_away(
    stop: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A surplus token is computed, and the next turn of the talk finds nothing of it."""
    params = runtime.SamplingParams(temperature=0, max_tokens=60, **stop)
    first = await plain("Hello", params)
    assert first[-1].finish_reason == "stop"
    n = len(first)
    turns = [[*b"Hello", *[i for i in ids(first) if i is not None], *b" more"], list(b"Hello")]
    async with ahead_engine(monkeypatch) as (engine, executor):
        tokens = await read(engine, "Hello", params)
        assert ids(tokens) == ids(first)
        await settled(engine)
        assert executor.n_steps == n + 1
        async with runtime.open_engine(CONFIG) as other:
            await read(other, "Hello", params)
            for turn in turns:
                here, there = await read(engine, turn, params), await read(other, turn, params)
                assert ids(here) == ids(there)
                assert here[-1].n_cached == there[-1].n_cached > 0


async def test_others_go_on_when_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (3, 9, 30, 17)
    prompts = [list(range(start, start + 7)) for start in (0, 40, 80, 120)]
    wanted = [GREEDY(max_tokens=n, ignore_eos=True) for n in lengths]
    async with ahead_engine(monkeypatch) as (engine, executor):
        answers = await asyncio.gather(*map(read, [engine] * 4, prompts, wanted))
        assert executor.n_ahead > 20
    for prompt, params, tokens in zip(prompts, wanted, answers, strict=True):
        assert ids(tokens) == ids(await plain(prompt, params))


async def test_a_new_request_ends_the_run_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GREEDY(max_tokens=40, ignore_eos=True)
    async with (
        ahead_engine(monkeypatch) as (engine, executor),
        aclosing(engine.generate("Hello", params)) as tokens,
    ):
        for _ in range(5):
            await anext(tokens)
        n_before = executor.n_steps
        await read(engine, "World", GREEDY(max_tokens=1))
        # The two steps in flight, the prompt, and what came while its answer was read.
        assert executor.n_steps - n_before <= 5
        rest = [token async for token in tokens]
    assert len(rest) == 35


async def test_cancelling_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GREEDY(max_tokens=200, ignore_eos=True)
    other = GREEDY(max_tokens=30, ignore_eos=True)
    async with ahead_engine(monkeypatch) as (engine, _):
        staying = asyncio.create_task(read(engine, "World", other))
        async with aclosing(engine.generate("Hello", params)) as tokens:
            for _ in range(6):
                await anext(tokens)
        assert ids(await staying) == ids(await plain("World", other))
        assert ids(await read(engine, "Hello", other)) == ids(await plain("Hello", other))
        assert engine.statistics().n_running == 0


async def test_only_the_sequence_that_is_not_finite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GREEDY(max_tokens=20, ignore_eos=True)
    async with ahead_engine(monkeypatch) as (engine, executor):
        executor.fail_when(lambda step: bool((step.positions == 12).any()))
        good = read(engine, "Hey", GREEDY(max_tokens=8, ignore_eos=True))
        answers = await asyncio.gather(good, read(engine, "Hello", params), return_exceptions=True)
        executor.fail_when(None)
        assert isinstance(answers[1], runtime.ComputeError)
        assert not isinstance(answers[0], BaseException)
        assert len(answers[0]) == 8
        assert ids(await read(engine, "Hello", params)) == ids(await plain("Hello", params))


async def test_work_between_steps_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GREEDY(max_tokens=60, ignore_eos=True)
    async with ahead_engine(monkeypatch) as (engine, _):
        await read(engine, "World", GREEDY(max_tokens=3))
        slot = next(s.id for s in engine.statistics().slots if s.n_tokens)
        async with aclosing(engine.generate("Hello", params)) as answer:
            tokens = [await anext(answer) for _ in range(5)]
            image, n_tokens = await engine.save_slot(slot)
            assert n_tokens
            assert image
            tokens += [token async for token in answer]
        assert ids(tokens) == ids(await plain("Hello", params))


@pytest.mark.parametrize("config", [CONFIG, TIGHT], ids=["room", "tight"])
@pytest.mark.parametrize("seed", range(6))
async def test_anything_at_any_time(
    seed: int, config: runtime.EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, end and are cancelled in every turn of the loop; prefixes are shared."""
    async with ahead_engine(monkeypatch, config) as (engine, executor):
        answers = await requests_at_any_time(engine, seed)
        assert executor.n_ahead > 0
    async with runtime.open_engine(CONFIG) as other:
        await check_answers(other, answers)


async def requests_at_any_time(engine: runtime.Engine, seed: int) -> list[Any]:
    """What was asked for and what came, until somebody cared no more; no page is lost."""
    rng = np.random.default_rng(seed)
    names, numbers = list(PARAMS), count(100)
    prefixes = [list(range(20)), list(range(50, 53)), [7]]

    async def request() -> tuple[list[int], Any, list[int | None]]:
        prompt = prefixes[rng.integers(3)] + rng.integers(0, 250, rng.integers(1, 9)).tolist()
        fields = {**PARAMS[names[rng.choice(6, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])]]}
        fields["seed"] = next(numbers)
        params = runtime.SamplingParams(max_tokens=int(rng.integers(1, 40)), **fields)
        n_read = int(rng.integers(1, 60))
        for _ in range(rng.integers(0, 60)):
            await asyncio.sleep(0)
        tokens: list[runtime.Token] = []
        async with aclosing(engine.generate(prompt, params)) as answer:
            async for token in answer:
                tokens.append(token)
                if len(tokens) == n_read:
                    break
        return prompt, params, ids(tokens)

    answers = await asyncio.gather(*(request() for _ in range(14)))
    await settled(engine)
    pages = engine.statistics()
    assert pages.n_pages_free + pages.n_pages_cached == pages.n_pages
    return answers


async def check_answers(other: runtime.Engine, answers: list[Any]) -> None:
    """Another engine says the same."""
    for prompt, params, got in answers:
        expected = ids(await read(other, prompt, params))
        assert got == expected[: len(got)]
