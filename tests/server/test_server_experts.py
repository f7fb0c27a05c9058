"""What the server tells of experts that move and of what fell back: metrics, props, timings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.engine.executor import CountingExecutor
from runtime.engine.step import Step, StepResult
from runtime.experts.totals import (
    FETCHED,
    IN_PLACE,
    N_KINDS,
    ON_CPU,
    ON_GPU,
    ExpertTotals,
    LinkTotals,
    StepUse,
)
from runtime.notices import Reason
from tests.server.serving import Served

TOTALS = ExpertTotals(
    hits=900,
    cpu=60,
    in_place=25,
    fetched=15,
    swaps=4,
    cpu_bytes=6000,
    cpu_seconds=0.25,
    wait_seconds=0.5,
    links=(LinkTotals("cuda:0", 40, 30, 20), LinkTotals("cuda:1", 4, 3, 2)),
)


async def metrics_of(served: Served) -> dict[str, float]:
    async with served.session.get(served.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    }


async def test_metrics_of_experts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.device, "expert_totals", lambda: TOTALS, raising=False)
    assert isinstance(served.device, CountingExecutor)
    values = await metrics_of(served)
    expected = {
        "hotexpert_expert_hits_total": 900,
        'hotexpert_expert_misses_total{served="cpu"}': 60,
        'hotexpert_expert_misses_total{served="in_place"}': 25,
        'hotexpert_expert_misses_total{served="fetched"}': 15,
        'hotexpert_link_bytes_total{gpu="cuda:0",purpose="upload"}': 40,
        'hotexpert_link_bytes_total{gpu="cuda:0",purpose="in_place"}': 30,
        'hotexpert_link_bytes_total{gpu="cuda:0",purpose="fetch"}': 20,
        'hotexpert_link_bytes_total{gpu="cuda:1",purpose="fetch"}': 2,
        "hotexpert_expert_swaps_total": 4,
        "hotexpert_expert_cpu_bytes_total": 6000,
        "hotexpert_cpu_seconds_total": 0.25,
        "hotexpert_cpu_wait_seconds_total": 0.5,
    }
    assert {name: values.get(name) for name in expected} == expected


async def test_whatever_fell_back_is_counted_and_told(served: Served) -> None:
    notices = served.engine.notices
    for _ in range(2):
        notices.add(Reason.UNPINNED, "the limit on locked memory is 64 KiB")
    notices.add(Reason.SHRUNK, "12 slots instead of 16")
    values = await metrics_of(served)
    assert values['hotexpert_fallback_total{reason="unpinned"}'] == 2
    assert values['hotexpert_fallback_total{reason="shrunk"}'] == 1
    assert values['hotexpert_fallback_total{reason="cache_off"}'] == 0
    _, props = await served.get("/props")
    assert props["engine"]["notices"] == [
        {"reason": "unpinned", "text": "the limit on locked memory is 64 KiB", "count": 2},
        {"reason": "shrunk", "text": "12 slots instead of 16", "count": 1},
    ]


async def test_a_request_is_told_its_own_hits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hits, and a miss of each kind, a token: in a layer of 10 and in one of 100 bytes."""
    plain = served.device.run

    async def run(step: Step) -> StepResult:
        result = await plain(step)
        counts = np.zeros((step.n_tokens, 2, N_KINDS), np.int64)
        counts[:, 0, [ON_GPU, ON_CPU, IN_PLACE]] = 3, 1, 1
        counts[:, 1, FETCHED] = 1
        use = StepUse(counts, np.array([10, 100], np.int64))
        return StepResult(result.logits, uses=((step.n_tokens, (use,)),))

    monkeypatch.setattr(served.device, "run", run)
    request = {"prompt": "abcd", "n_predict": 3, "ignore_eos": True, "cache_prompt": False}
    _, body = await served.post("/completion", request)
    n_tokens = 4 + 3 - 1  # nothing is computed of the last one
    assert body["timings"]["expert_hit_rate"] == pytest.approx(0.5)
    assert body["timings"]["expert_miss_bytes"] == pytest.approx(n_tokens * 120)


async def test_timings_say_nothing_of_experts_that_do_not_move(served: Served) -> None:
    _, body = await served.post("/completion", {"prompt": "ab", "n_predict": 2})
    assert not [name for name in body["timings"] if name.startswith("expert")]


async def test_layers_are_counted_by_what_computed_them(served: Served) -> None:
    assert not any("hotexpert_layers" in name for name in await metrics_of(served)), "not known"
    executor: Any = served.engine.executor
    executor.layers_computed = {"gpu": 90, "cpu": 0}
    values = await metrics_of(served)
    assert values['hotexpert_layers_total{device="gpu"}'] == 90
    assert values['hotexpert_layers_total{device="cpu"}'] == 0
