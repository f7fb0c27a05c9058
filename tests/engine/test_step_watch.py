"""What steps show: hits of the last tokens, and what follows for who serves misses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu import step_watch
from runtime.engine.gpu.step_watch import COUNT_EVERY, ENOUGH_TOKENS, StepWatch
from runtime.engine.step import StepKind
from runtime.experts.miss_rates import MissRates
from runtime.experts.miss_rule import TRIAL_STEPS, MissRule
from runtime.experts.totals import N_KINDS, ON_CPU, ON_GPU, ExpertTotals, LinkTotals, StepUse

SLOW_CPU = MissRates((100.0, 200.0, 300.0, 400.0), (120.0, 240.0, 360.0, 480.0), 50.0, 60.0)
DECODE: Any = SimpleNamespace(kind=StepKind.DECODE, n_tokens=1)
PREFILL: Any = SimpleNamespace(kind=StepKind.PREFILL, n_tokens=64)


class Memory:
    def __init__(self) -> None:
        self.rules: list[int] = []

    def read_in_place(self, every: int) -> bool:
        self.rules.append(every)
        return True


def watch_of(monkeypatch: pytest.MonkeyPatch, busy: list[float]) -> tuple[StepWatch, Any]:
    """Two layers whose team has worked busy[0] seconds; an expert takes the link 60 us."""
    monkeypatch.setattr(step_watch, "expected_hit_rate", lambda plan: None)
    link = LinkTotals("cuda:0", uploaded=600_000, in_place=0, fetched=0, gb_s=1.0)
    totals = ExpertTotals(swaps=10, links=(link,))
    parts: Any = SimpleNamespace(
        planned=SimpleNamespace(settings=SimpleNamespace(notices=None)),
        misses=MissRule(SLOW_CPU),
        memory=Memory(),
        exchange=SimpleNamespace(team_seconds=lambda: (busy[0], 0.0)),
        experts=SimpleNamespace(totals=lambda: totals),
    )
    return StepWatch(parts), parts


def use_of(n_missed: int) -> tuple[StepUse, ...]:
    counts = np.zeros((1, 2, N_KINDS), np.int64)
    counts[..., ON_CPU], counts[..., ON_GPU] = n_missed, 8 - n_missed
    return (StepUse(counts, np.ones(2, np.int64)),)


async def test_a_slow_cpu_is_helped_once_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, parts = watch_of(monkeypatch, [0.0])
    rules = []
    for _ in range(4 * TRIAL_STEPS):
        await watch.idle()
        rules.append(parts.misses.every)
        watch.ended(DECODE, use_of(4), 0.8e-3 if parts.misses.every else 1e-3)
    assert parts.memory.rules == [2] and rules[0] == 0 and rules[-1] == 2
    assert "+20.0 % quicker" in parts.misses.why


async def test_rates_follow_what_the_team_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of eight missed in two layers: 800 us a token by the rates, 80 as it turns out."""
    busy = [0.0]
    watch, _ = watch_of(monkeypatch, busy)
    await watch.idle()
    for _ in range(ENOUGH_TOKENS + COUNT_EVERY):
        watch.ended(DECODE, use_of(4), 1e-3)
        busy[0] += 80e-6
    rates, misses = watch._rates_now(SLOW_CPU)
    assert misses.sum() == pytest.approx(2) and misses @ np.arange(9) == pytest.approx(8)
    assert rates.of_token(misses, 0) == pytest.approx(80, rel=0.1)
    assert rates.link_beside == pytest.approx(60)
    assert rates.best(misses) == 0


async def test_prompts_between_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [0.0]
    watch, _ = watch_of(monkeypatch, busy)
    await watch.idle()
    for _ in range(2 * ENOUGH_TOKENS):
        watch.ended(DECODE, use_of(2), 1e-3)
    busy[0] = 5.0
    watch.ended(PREFILL, use_of(8), 1.0)
    rates, misses = watch._rates_now(SLOW_CPU)
    assert rates.cpu == SLOW_CPU.cpu
    assert misses @ np.arange(9) == pytest.approx(4)
