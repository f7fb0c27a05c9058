"""The profiler: what it makes of a step loop's calls, which steps it has timed, who is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from runtime.profiling import profiler as profiler_file
from runtime.profiling.instrument import Instrument
from runtime.profiling.profiler import Profiler
from runtime.profiling.record import Part, Span, StepRecord, StepSort, StepTimes


class Clock:
    """`time.perf_counter` by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Executor:
    """Times are what a test says."""

    def __init__(self) -> None:
        self.timed = False
        self.times: list[StepTimes] = []

    def take_times(self) -> list[StepTimes]:
        times, self.times = self.times, []
        return times


class Kept(Instrument):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.begun: list[int] = []
        self.n_closed = 0

    def step_begins(self, number: int, sort: StepSort, n_tokens: int) -> None:
        self.begun.append(number)

    def step_ended(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.n_closed += 1


def profiler_of(executor: object, instruments: list[Instrument], **sizes: int) -> Profiler:
    made = Profiler(executor, **sizes)
    for instrument in instruments:
        made.attach(instrument)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profiler_file, "time", made)
    return made


def test_the_parts_of_a_step_tile_its_time(clock: Clock) -> None:
    executor, kept = Executor(), Kept()
    profiler = profiler_of(executor, [kept], every=1, n_timed=1)
    clock.now += 5  # nobody asked for anything
    profiler.woke()
    clock.now += 0.25
    profiler.answered(clock.now - 0.125)  # of an earlier step
    profiler.begins(StepSort.DECODE, 2)
    assert executor.timed
    clock.now += 0.25
    launched = clock.now
    clock.now += 2
    span = Span("GPU 0", Part.DENSE, launched + 0.5, 1.0)
    executor.times = [
        StepTimes(launched, {Part.DENSE: 1.0, Part.LAUNCH: 0.125}, spans=lambda: [span])
    ]
    profiler.ended(2)
    (record,) = kept.records
    assert (record.began, record.ended, record.n_tokens, record.n_outputs) == (105, 107.5, 2, 2)
    assert record.parts == {
        Part.DENSE: 1.0,
        Part.LAUNCH: 1.0,
        Part.SAMPLING: 0.125,
        Part.HOST: 0.375,
    }
    assert sum(record.parts.values()) == record.seconds
    assert span in record.spans
    assert list(record.parts) == [part for part in Part if part in record.parts], "in Part's order"


def test_behind_another_step_nobody_waits_for_the_host(clock: Clock) -> None:
    executor, kept = Executor(), Kept()
    profiler = profiler_of(executor, [kept], every=1, n_timed=1)
    profiler.begins(StepSort.DECODE, 1)
    clock.now += 0.5
    profiler.begins(StepSort.DECODE, 1)
    second = clock.now
    clock.now += 1
    profiler.ended(1)
    profiler.answered(clock.now)
    clock.now += 2
    executor.times = [StepTimes(second, {Part.HITS: 1.75})]
    profiler.ended(1)
    record = kept.records[1]
    assert record.seconds == 2
    assert record.parts == {Part.HITS: 1.75, Part.LAUNCH: 0.25}


def test_a_step_in_pieces_has_the_parts_of_all(clock: Clock) -> None:
    executor, kept = Executor(), Kept()
    profiler = profiler_of(executor, [kept], every=1, n_timed=1)
    profiler.begins(StepSort.PROMPT, 100)
    launched = clock.now
    clock.now += 4
    executor.times = [
        StepTimes(launched, {Part.DENSE: 1.0}),
        StepTimes(launched + 2, {Part.DENSE: 0.5, Part.LOGITS: 0.5}),
    ]
    profiler.ended(1)
    assert kept.records[0].parts == {Part.DENSE: 1.5, Part.LOGITS: 0.5, Part.LAUNCH: 2.0}


def test_the_last_decode_steps_of_a_window_are_timed_and_the_first_of_these_not_used(
    clock: Clock,
) -> None:
    executor, kept = Executor(), Kept()
    profiler = profiler_of(executor, [kept], every=8, n_timed=3)
    timed = []
    for _ in range(16):
        profiler.begins(StepSort.DECODE, 1)
        timed.append(executor.timed)
        clock.now += 1
        executor.times = [StepTimes(clock.now, {Part.DENSE: 0.5})] if executor.timed else []
        profiler.ended(1)
    assert timed == 2 * (5 * [False] + 3 * [True])
    assert [record.timed for record in kept.records] == timed
    used = [record.timed and not record.fresh for record in kept.records]
    assert used == 2 * (6 * [False] + 2 * [True])
    assert [record.fresh for record in kept.records] == 2 * (5 * [False] + [True, False, False])


def test_prompts_are_timed_always(clock: Clock) -> None:
    executor = Executor()
    profiler = profiler_of(executor, [Kept()], every=8, n_timed=1)
    for sort, timed in ((StepSort.DECODE, False), (StepSort.PROMPT, True)):
        profiler.begins(sort, 1)
        assert executor.timed is timed
        profiler.ended(1)


def test_an_executor_without_times_gives_records_without_parts(clock: Clock) -> None:
    kept = Kept()
    profiler = profiler_of(object(), [kept], every=1, n_timed=1)
    profiler.begins(StepSort.DECODE, 1)
    clock.now += 3
    profiler.ended(1)
    assert (kept.records[0].seconds, kept.records[0].timed) == (3, False)


def test_a_step_that_was_in_flight_at_the_start_is_left_out(clock: Clock) -> None:
    kept = Kept()
    profiler = profiler_of(object(), [kept])
    clock.now += 3
    profiler.ended(1)
    profiler.begins(StepSort.DECODE, 1)
    clock.now += 1
    profiler.ended(1)
    assert [record.seconds for record in kept.records] == [1]


def test_a_step_that_could_not_begin_is_none(clock: Clock) -> None:
    kept = Kept()
    profiler = profiler_of(object(), [kept])
    profiler.begins(StepSort.DECODE, 1)
    profiler.begins(StepSort.DECODE, 2)
    profiler.did_not_begin()
    clock.now += 1
    profiler.ended(1)
    profiler.begins(StepSort.DECODE, 3)
    profiler.ended(1)
    assert [record.n_tokens for record in kept.records] == [1, 3]


def test_detached_ones_are_closed_and_the_last_ends_the_timing(clock: Clock) -> None:
    executor, first, second = Executor(), Kept(), Kept()
    profiler = profiler_of(executor, [first, second], every=1, n_timed=1)
    profiler.begins(StepSort.DECODE, 1)
    profiler.ended(1)
    assert not profiler.detach(first) and executor.timed
    assert not profiler.detach(first), "harmless"
    assert profiler.detach(second) and not executor.timed
    assert (first.n_closed, second.n_closed) == (1, 1)


@pytest.mark.parametrize("hook", ["step_begins", "step_ended", "close"])
def test_an_instrument_that_raises_is_out_and_the_others_go_on(
    hook: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Kept):
        pass

    def fail(*arguments: Any) -> None:
        raise ValueError("out of ink")

    bad, good = Bad(), Kept()
    patched: Callable[..., None] = fail
    setattr(bad, hook, patched)
    profiler = profiler_of(object(), [bad, good])
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            profiler.begins(StepSort.DECODE, 1)
            clock.now += 1
            profiler.ended(1)
        profiler.close()
    assert len(good.records) == 2 and good.begun == [0, 1] and good.n_closed == 1
    assert caplog.text.count("ValueError: out of ink") == 1
    assert bad.n_closed == (hook != "close")
