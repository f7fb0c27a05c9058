"""Where a GPU's step spends its time: stamps in graphs of their own, read after its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.engine.step import StepKind
from runtime.experts import fetched_experts
from runtime.models import open_model
from runtime.profiling.instrument import Instrument
from runtime.profiling.record import Part, StepRecord, StepSort
from runtime.profiling.summary import SchedProf
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.profiling.test_profiler import profiler_of
from tests.support.bad_gpu import bad_machine, config_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.stub_kernels import StubKernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

AHEAD_NS = 7 * 10**15
"""A GPU's clock has a start of its own."""

ALL, SOME = 8, 3
SETTINGS = {"n_threads": 2, "exchange_rounds": 0}


def timed_driver() -> FakeDriver:
    """A fake GPU whose clock runs."""
    fake = hybrid_driver()

    def timestamp(span: Callable[[int, int], Any], target: int) -> None:
        span(target, 8).view(np.uint64)[0] = time.perf_counter_ns() + AHEAD_NS

    fake.kernels["timestamp"] = timestamp
    return fake


class Kept(Instrument):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step_ended(self, record: StepRecord) -> None:
        self.records.append(record)


def small_model(tmp_path: Path, n_layers: int = 2) -> Path:
    return BLOCK_MODELS["qwen3moe"]("Q8_0", n_layers).write(tmp_path / "model.gguf")


async def records_of(executor: GPUExecutor, n_steps: int) -> list[StepRecord]:
    """Of a prompt and decode steps, all of them timed."""
    kept = Kept()
    profiler = profiler_of(executor, [kept], every=1, n_timed=1)
    prompt = step_of(executor, StepKind.PREFILL, [(1, TOKENS[:3], 0)])
    steps = [
        step_of(executor, StepKind.DECODE, [(1, TOKENS[i : i + 1], i)])
        for i in range(3, 3 + n_steps)
    ]
    for step in (prompt, *steps):
        is_prompt = step.kind is StepKind.PREFILL
        profiler.begins(StepSort.PROMPT if is_prompt else StepSort.DECODE, step.n_tokens)
        await executor.run(step)
        profiler.ended(len(step.output_tokens))
    return kept.records


@pytest.mark.parametrize("held", [ALL, SOME])
async def test_the_parts_of_a_step_are_its_whole_time(held: int, tmp_path: Path) -> None:
    with open_model(small_model(tmp_path)) as model:
        settings = {**SETTINGS, "moe_expert_cache": held}
        async with executor_of(model, tmp_path, timed_driver(), **settings) as executor:
            records = await records_of(executor, 2)
    assert [record.fresh for record in records] == [True, True, False]
    for record in records[2:]:
        parts = record.parts
        assert sum(parts.values()) == pytest.approx(record.seconds, rel=0.03)
        assert all(seconds >= 0 for seconds in parts.values()), parts
        assert {Part.DENSE, Part.ROUTER, Part.HITS, Part.LOGITS} < set(parts)
        assert ({Part.MISSES, Part.EXCHANGE} < set(parts)) == (held < ALL)
        # What is left over is no more than the work before the first and behind the last stamp.
        assert parts[Part.LAUNCH] < 0.5 * record.seconds


async def test_spans_lie_in_their_step_one_behind_the_other(tmp_path: Path) -> None:
    with open_model(small_model(tmp_path)) as model:
        settings = {**SETTINGS, "moe_expert_cache": SOME}
        async with executor_of(model, tmp_path, timed_driver(), **settings) as executor:
            record = (await records_of(executor, 2))[-1]
    spans = [span for span in record.spans if span.track == "GPU 0"]
    for span, following in pairwise(spans):
        assert span.began + span.seconds == pytest.approx(following.began, abs=1e-9)
    slack = 1e-4
    assert record.began - slack <= spans[0].began
    assert spans[-1].began + spans[-1].seconds <= record.ended + slack
    names = [span.name for span in spans]
    assert names.count(Part.MISSES) == 2, "each of the two layers waits once"
    team = [span for span in record.spans if span.track == "CPU team"]
    assert len(team) <= 2
    for span in team:
        waits = [s for s in spans if s.name == Part.MISSES]
        end = span.began + span.seconds
        assert any(wait.began + wait.seconds >= end - slack for wait in waits)
    assert sum(span.seconds for span in team) > 0


async def test_graphs_without_times_are_as_if_there_were_no_stamps(tmp_path: Path) -> None:
    def sources(executor: GPUExecutor, step: Any, *, timed: bool) -> list[str]:
        parts = executor._parts
        shape = parts.shapes.of(step)
        launches = parts.steps.launches(parts.shapes.timed(shape) if timed else shape)  # type: ignore[attr-defined]
        return [planned.kernel.source for planned, _ in launches]

    with open_model(small_model(tmp_path)) as model:
        settings = {**SETTINGS, "moe_expert_cache": SOME}
        async with executor_of(model, tmp_path, timed_driver(), **settings) as executor:
            step = step_of(executor, StepKind.DECODE, [(1, TOKENS[:1], 0)])
            expected = await logits_of(executor, step)
            before = sources(executor, step, timed=False)
            executor.timed = True
            assert np.array_equal(await logits_of(executor, step), expected)
            assert len(executor.take_times()) == 1
            executor.timed = False
            assert np.array_equal(await logits_of(executor, step), expected)
            assert executor.take_times() == []
            assert sources(executor, step, timed=False) == before
            stamped = sources(executor, step, timed=True)
    assert "timestamp.ptx" not in before
    assert [source for source in stamped if source != "timestamp.ptx"] == before
    # Two layers: dense, router, hits, wait each; the step's start; the rest, logits and the end.
    assert stamped.count("timestamp.ptx") == 1 + 2 * 4 + 3


async def test_prompts_that_fetch_say_how_long_they_waited_for_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_experts, "FETCHED_TOKENS", 8)
    with open_model(small_model(tmp_path, 2)) as model:
        settings = {**SETTINGS, "moe_expert_cache": SOME}
        async with executor_of(model, tmp_path, timed_driver(), **settings) as executor:
            executor.timed = True
            await executor.run(step_of(executor, StepKind.PREFILL, [(0, TOKENS[:8], 0)]))
            (times,) = executor.take_times()
    assert times.fresh
    assert times.parts[Part.UPLOADS] > 0
    assert Part.MISSES not in times.parts
    fetched = [span for span in times.spans() if span.track == "link 0"]
    assert [span.name for span in fetched] == [Part.UPLOADS] * 2


async def test_a_step_in_pieces_has_the_times_of_each(tmp_path: Path) -> None:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.kernels = StubKernels()
    with open_model(small_model(tmp_path, 1)) as model:
        settings = {"max_step_tokens": 300, "n_ctx": 1024}
        async with executor_of(model, tmp_path, fake, **settings) as executor:
            executor.timed = True
            outputs = list(range(130))
            tokens = np.resize(TOKENS, 130)
            step = step_of(executor, StepKind.PREFILL, [(0, tokens, 0)], outputs)
            await executor.run(step)
            assert len(executor.take_times()) == 2


async def test_several_gpus_have_their_parts_together(tmp_path: Path) -> None:
    """The second GPU's wait for the first is no part of its own."""
    fake = timed_driver()
    fake.n_devices = 2
    with open_model(small_model(tmp_path)) as model:
        settings = {**SETTINGS, "split": True, "moe_expert_cache": SOME, "max_step_tokens": 40}
        async with executor_of(model, tmp_path, fake, **settings) as executor:
            record = (await records_of(executor, 2))[-1]
    assert len(record.launches) == 2
    assert sum(record.parts.values()) == pytest.approx(record.seconds, rel=0.03)
    assert Part.HAND_OVER in record.launches[0].parts
    assert Part.HAND_OVER not in record.launches[1].parts
    assert not any(Part.LAUNCH in launch.parts for launch in record.launches)
    assert {"GPU 0", "GPU 1"} <= {span.track for span in record.spans}
    for launch in record.launches:
        assert launch.parts[Part.EXCHANGE] + launch.parts[Part.MISSES] > 0


@pytest.mark.parametrize("n_gpus", [1, 2])
async def test_an_engine_that_runs_ahead_is_timed_too(
    n_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel computes anything; steps begin before the ones before them have ended."""
    fake = bad_machine(monkeypatch, tmp_path / "cubins")
    kernels = StubKernels()
    clock = timed_driver().kernels["timestamp"]
    kernels["timestamp"] = clock
    fake.kernels, fake.n_devices = kernels, n_gpus
    lines: list[str] = []
    config = config_of(small_model(tmp_path), device="cuda", split_mode="layer")
    async with open_engine(config) as engine:
        kept = Kept()
        engine.attach(SchedProf(lines.append))
        engine.attach(kept)
        params = SamplingParams(temperature=0.0, max_tokens=130, ignore_eos=True)
        tokens = [token.id async for token in engine.generate([5, 7], params)]
    assert len(tokens) == 130
    used = [r for r in kept.records if r.timed and not r.fresh and r.sort is StepSort.DECODE]
    assert len(used) == 8
    for record in used:
        assert sum(record.parts.values()) == pytest.approx(record.seconds)
        assert Part.HOST not in record.parts, "the host's work is hidden"
    assert [line for line in lines if "4 timed" in line]
    assert fake.live == {}
