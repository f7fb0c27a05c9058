"""Steps of recurrent models run ahead: a state that has read a token too many is that after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import runtime
from runtime.engine import fake_executor, state_cache
from runtime.engine.executor import ExecutorLimits
from runtime.engine.fake_executor import FakeExecutor
from tests.engine.test_run_ahead import (
    CONFIG,
    TIGHT,
    check_answers,
    requests_at_any_time,
    settled,
)
from tests.support.ahead_executor import AheadExecutor
from tests.support.fake_engine import GREEDY, ids, read

pytestmark = pytest.mark.usefixtures("no_task_is_left")

N_SNAPSHOTS = 8
UNTIL_END = runtime.SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(autouse=True)
def _many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "WORTHWHILE", 16)
    monkeypatch.setattr(state_cache, "SPACING", 32)


@asynccontextmanager
async def recurrent_engine(
    monkeypatch: pytest.MonkeyPatch,
    base: type[FakeExecutor] = AheadExecutor,
    config: runtime.EngineConfig = CONFIG,
    n_previous: int = 0,
) -> AsyncIterator[tuple[runtime.Engine, Any]]:
    """An engine over a fake device with states; it may look at the tokens before a step's."""

    class Recurrent(base):  # type: ignore[valid-type, misc]
        def __init__(self, limits: ExecutorLimits, **options: Any) -> None:
            n_slots = limits.max_sequences + N_SNAPSHOTS
            own = replace(limits, n_state_slots=n_slots, n_previous=n_previous)
            super().__init__(own, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fake_executor, "FakeExecutor", Recurrent)
        async with runtime.open_engine(config) as engine:
            yield engine, engine.executor
            await settled(engine)
            states = engine._steps.scheduler.states
            assert states is not None
            n_held = len(states._free) + states.n_snapshots
            assert n_held == engine.executor.limits.n_state_slots, "a slot is lost"
            assert not engine._steps.scheduler._leaving


async def plain(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int], params: runtime.SamplingParams
) -> list[int | None]:
    """What a fresh engine answers that does not run ahead."""
    async with recurrent_engine(monkeypatch, FakeExecutor) as (engine, _):
        return ids(await read(engine, prompt, params))


def known(tokens: list[int | None]) -> list[int]:
    return [token for token in tokens if token is not None]


async def test_a_turn_begins_behind_the_token_that_ended_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with recurrent_engine(monkeypatch) as (engine, executor):
        first = await read(engine, "Hello", UNTIL_END)
        assert first[-1].finish_reason == "stop"
        assert ids(first) == await plain(monkeypatch, [*b"Hello"], UNTIL_END)
        assert executor.n_ahead > 2
        turn = [*b"Hello", *known(ids(first)), 5, 6, 7]
        second = await read(engine, turn, UNTIL_END)
    assert second[0].n_cached == len(turn) - 3, "the surplus step has read the last token"
    assert ids(second) == await plain(monkeypatch, turn, UNTIL_END)


async def test_a_foreseen_end_has_no_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    params = GREEDY(max_tokens=20, ignore_eos=True)
    async with recurrent_engine(monkeypatch) as (engine, executor):
        first = await read(engine, "Hello", params)
        assert executor.n_steps == 20
        turn = [*b"Hello", *known(ids(first)), 5, 6, 7]
        second = await read(engine, turn, params)
    assert second[0].n_cached == len(turn) - 4
    assert ids(second) == await plain(monkeypatch, turn, params)


async def test_what_a_failed_surplus_has_read_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = await plain(monkeypatch, [*b"Hello"], UNTIL_END)
    surplus = 5 + len(first) - 1  # position of the token that ends the answer
    turn = [*b"Hello", *known(first), 5, 6, 7]
    async with recurrent_engine(monkeypatch) as (engine, executor):
        executor.fail_when(lambda step: bool((step.positions == surplus).any()))
        assert ids(await read(engine, "Hello", UNTIL_END)) == first
        await settled(engine)
        executor.fail_when(None)
        second = await read(engine, turn, UNTIL_END)
    assert second[0].n_cached < surplus
    assert ids(second) == await plain(monkeypatch, turn, UNTIL_END)


async def test_what_a_cancelled_answer_has_read_unseen_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last step reads a token that nobody was told of."""
    params = GREEDY(max_tokens=40, ignore_eos=True)
    whole = [*b"Hello", *known(await plain(monkeypatch, [*b"Hello"], params))]
    async with recurrent_engine(monkeypatch) as (engine, _):
        async with aclosing(engine.generate("Hello", params)) as tokens:
            for _ in range(9):
                await anext(tokens)
        again = await read(engine, whole, params)
    assert again[0].n_cached <= 5 + 9
    assert ids(again) == await plain(monkeypatch, whole, params)


async def test_states_are_kept_where_texts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ends where a state is copied has none behind it."""
    params = GREEDY(max_tokens=80, ignore_eos=True)
    async with recurrent_engine(monkeypatch) as (engine, executor):
        first = await read(engine, "Hello", params)
        n_ahead = executor.n_ahead
        branch = [*b"Hello", *known(ids(first))[:64], 9, 9]
        second = await read(engine, branch, params)
    assert second[0].n_cached == 64
    assert n_ahead == 80 - 2 - len(range(32, 85, 32))
    assert ids(second) == await plain(monkeypatch, branch, params)


@pytest.mark.parametrize("config", [CONFIG, TIGHT], ids=["room", "tight"])
@pytest.mark.parametrize("seed", range(6))
async def test_anything_at_any_time(
    seed: int, config: runtime.EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_previous = seed % 3
    async with recurrent_engine(monkeypatch, config=config, n_previous=n_previous) as (
        engine,
        executor,
    ):
        answers = await requests_at_any_time(engine, seed)
        assert executor.n_ahead > 0
    async with recurrent_engine(monkeypatch, FakeExecutor) as (other, _):
        await check_answers(other, answers)
