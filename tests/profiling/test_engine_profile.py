"""Profiling an engine on the CPU, end to end: lines, traces, instruments, and the same tokens."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.profiling.record import Part
from runtime.profiling.trace_file import records_in, track_seconds
from tests.profiling.test_summary import printed_parts

GREEDY = runtime.SamplingParams(temperature=0.0, max_tokens=130, ignore_eos=True)


class Kept(runtime.Instrument):
    def __init__(self) -> None:
        self.records: list[runtime.StepRecord] = []
        self.closed = False

    def step_ended(self, record: runtime.StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


async def ids_of(engine: runtime.Engine) -> list[int | None]:
    return [token.id async for token in engine.generate("Once upon a time", GREEDY)]


async def test_a_cpu_step_is_broken_down_and_its_tokens_stay() -> None:
    async with runtime.open_engine(runtime.EngineConfig(device="cpu")) as engine:
        plain = await ids_of(engine)
        kept = Kept()
        engine.attach(kept)
        assert await ids_of(engine) == plain
        engine.detach(kept)
        n_records = len(kept.records)
        assert await ids_of(engine) == plain
        assert len(kept.records) == n_records and kept.closed
    used = [r for r in kept.records if r.timed and not r.fresh and r.sort == "decode"]
    assert len(used) == 8, "the last four of each 64"
    for record in used:
        parts = record.parts
        assert sum(parts.values()) == pytest.approx(record.seconds, rel=0.03)
        computed = {Part.DENSE, Part.ATTENTION, Part.ROUTER, Part.EXPERTS, Part.LOGITS}
        assert {*computed, Part.LAUNCH, Part.SAMPLING, Part.HOST} == set(parts)
        assert all(seconds >= 0 for seconds in parts.values())
        # Nothing that the team does is outside what its own times say.
        team = [span for span in record.spans if span.track == "CPU team"]
        assert sum(s.seconds for s in team) == pytest.approx(sum(parts[p] for p in computed))
        assert record.began <= team[0].began
        assert team[-1].began + team[-1].seconds <= record.ended + 1e-4


async def test_the_variable_prints_lines_and_writes_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setenv("GGML_SCHED_PROF", f"1,{path}")
    with caplog.at_level(logging.WARNING, logger="runtime.profiling.environment"):
        async with runtime.open_engine(runtime.EngineConfig(device="cpu")) as engine:
            await ids_of(engine)
    lines = [line.getMessage() for line in caplog.records if "decode tokens" in line.getMessage()]
    assert len(lines) == 3, "two windows, and the rest"
    for line in lines[:2]:
        whole, total = printed_parts(line)
        assert total == pytest.approx(whole, rel=0.03)
    assert len([r for r in records_in(path) if r.sort == "decode"]) == 129
    assert {"steps", "loop", "CPU team"} <= set(track_seconds(path))


async def test_a_wrong_variable_stops_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_SCHED_PROF", "lots")
    with pytest.raises(runtime.ConfigError, match="GGML_SCHED_PROF = lots"):
        async with runtime.open_engine(runtime.EngineConfig(device="fake")):
            pass


async def test_steps_of_several_sequences_and_idle_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake device: what lies between two requests belongs to no step."""
    async with runtime.open_engine(runtime.EngineConfig(device="fake")) as engine:
        kept = Kept()
        engine.attach(kept)
        params = runtime.SamplingParams(max_tokens=5, ignore_eos=True)
        async for _ in engine.generate("abc", params, n=3):
            pass
        async for _ in engine.generate("abd", params):
            pass
    assert kept.closed
    prompts = [r for r in kept.records if r.sort == "prompt"]
    decoded = [r for r in kept.records if r.sort == "decode"]
    assert sum(r.n_outputs for r in kept.records) == 3 * 5 + 5
    assert prompts and decoded
    ends = [r.ended for r in kept.records]
    assert all(r.began >= end for r, end in zip(kept.records[1:], ends, strict=False))


async def test_nvtx_ranges_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[int, str] = {}
    ended: list[int] = []
    module: Any = types.ModuleType("nvtx")

    def start_range(message: str, domain: str) -> int:
        opened[len(opened)] = message
        return len(opened) - 1

    module.start_range, module.end_range = start_range, ended.append
    monkeypatch.setitem(sys.modules, "nvtx", module)
    monkeypatch.setenv("GGML_SCHED_PROF", "nvtx")
    async with runtime.open_engine(runtime.EngineConfig(device="fake")) as engine:
        async for _ in engine.generate("abc", runtime.SamplingParams(max_tokens=3)):
            pass
    assert opened[0] == "prompt of 3" and "decode of 1" in opened.values()
    assert sorted(ended) == sorted(opened)


async def test_without_the_package_nvtx_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("GGML_SCHED_PROF", "nvtx")
    with pytest.raises(runtime.ConfigError, match="pip install nvtx"):
        async with runtime.open_engine(runtime.EngineConfig(device="fake")):
            pass
