"""Who serves missed experts: measured at the start, changed between steps, and no bit differs;
and what the loop does while a step runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.runs import recorded_ids, run_of
from runtime.cuda import module as module_file
from runtime.cuda.driver import initialized
from runtime.experts.cached_experts import CachedExperts
from runtime.experts.self_test import SelfTest
from runtime.experts.totals import ON_CPU, ON_GPU
from runtime.notices import Reason
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_TOKENS = 4
SETTINGS: dict[str, Any] = {"moe_expert_cache": 2, "n_threads": 2, "n_batch": 8}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A file, and a machine with a fake GPU."""
    fake = FakeDriver(memory_bytes=1 << 30)
    monkeypatch.setattr("runtime.cuda.driver.open_driver", lambda: initialized(fake, "13.4.4"))
    monkeypatch.setattr(module_file, "default_directory", lambda: tmp_path / "cubins")
    monkeypatch.setattr("runtime.experts.self_test.self_test", lambda *args: SelfTest(1, 1.0))
    yield BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(tmp_path / "model.gguf")


async def test_a_rule_changes_between_steps_and_no_bit_does(model: Path) -> None:
    async with run_of(model, "cuda", 1, 16, **SETTINGS) as run:
        text = recorded_ids(12, run.limits.n_vocab)
        executor: Any = run.executor
        memory, rows, reads = executor._parts.memory, [], []
        for every in (0, 2, 0):
            assert await asyncio.to_thread(memory.read_in_place, every)
            before = executor.describe()["expert_in_place_reads"]
            rows.append([(await run.decode([text], at)).logits.copy() for at in range(N_TOKENS)])
            reads.append(executor.describe()["expert_in_place_reads"] - before)
        assert reads[0] == reads[2] == 0 < reads[1]
        for with_rule in rows[1:]:
            assert np.array_equal(np.array(with_rule), np.array(rows[0]))


async def test_what_misses_take_is_measured_at_the_start(model: Path) -> None:
    async with run_of(model, "cuda", 1, 16, **SETTINGS) as run:
        facts: Any = run.executor.describe()
        rates = facts["expert_miss_rates"]
        assert len(rates["cpu_us"]) == 3 and min(rates["cpu_us"]) > 0
        assert facts["expert_misses"] == "the CPU: not looked at yet"
        text = recorded_ids(4, run.limits.n_vocab)
        result = await run.decode([text], 0)  # the words of the probe harm no step
        assert np.isfinite(result.logits).all()


async def test_a_rule_that_is_asked_for_holds_from_the_first_step(model: Path) -> None:
    settings = {**SETTINGS, "moe_cache": (("misses", "2"),)}
    async with run_of(model, "cuda", 1, 16, **settings) as run:
        text = recorded_ids(8, run.limits.n_vocab)
        for at in range(3):
            await run.decode([text], at)
        facts = run.executor.describe()
        assert facts["expert_misses"] == "the CPU, one of 2 in place: asked for"
        assert int(str(facts["expert_in_place_reads"])) > 0


async def test_a_rule_that_cannot_hold_is_told(model: Path) -> None:
    """Experts that stay in the file's map are not pinned, so no GPU reads them in place."""
    settings = {**SETTINGS, "moe_cache": (("misses", "2"),), "load_mode": "mmap"}
    async with run_of(model, "cuda", 1, 16, **settings) as run:
        text = recorded_ids(8, run.limits.n_vocab)
        for at in range(3):
            await run.decode([text], at)
        executor: Any = run.executor
        assert "cannot be" in str(executor.describe()["expert_misses"])
        notices = executor._parts.planned.settings.notices.all
        told = [notice for notice in notices if "misses = 2" in notice.text]
        assert [(notice.reason, notice.count) for notice in told] == [(Reason.UNPINNED, 1)]


async def test_tokens_are_forced_while_steps_run_ahead(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions about experts are made when the loop waits, not before a step is launched."""
    begun: list[str] = []
    real = CachedExperts.while_running

    def decide(experts: CachedExperts) -> None:
        begun.append("decided")
        real(experts)

    monkeypatch.setattr(CachedExperts, "while_running", decide)
    async with run_of(model, "cuda", 1, 16, **SETTINGS) as run:
        executor: Any = run.executor
        text = recorded_ids(12, run.limits.n_vocab)
        flight = await executor.begin(run._forcing(text, 0, follows=False))
        assert not begun
        ended, executor._ends.of = executor._ends.of, lambda epoch: lambda: False
        with pytest.raises(TimeoutError):  # the step still runs, as far as the loop knows
            await asyncio.wait_for(flight.result(), 0.01)
        executor._ends.of = ended
        await flight.result()
        assert begun == ["decided"]
        timed = await run.run_ahead(text, 1, 1 + N_TOKENS)
        assert len(timed.us) == N_TOKENS and min(timed.us) > 0
        assert timed.counts.shape[:2] == (N_TOKENS, 2)
        assert (timed.counts[:, :, [ON_CPU, ON_GPU]].sum(axis=2) == 3).all()
        assert len(begun) >= N_TOKENS
