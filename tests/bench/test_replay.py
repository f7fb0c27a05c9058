"""The replay's clock and sums on traces small enough to work out by hand; the synthetic routers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.routing import main, trace_of
from bench.routing.bounds import lru_curve, most_used_share
from bench.routing.contenders import CONTENDERS, equal_slots, falling_gains, marginal_slots
from bench.routing.rates import MACHINES, Rates
from bench.routing.replay import layer_slots, replay, shared_slots
from bench.routing.synthetic import synthetic_trace
from profiles import Phase, RoutingTrace, save_trace
from runtime.experts.cache import Expert, ExpertCache, Rows

MB = 1_000_000
RATES = Rates(cpu=10.0, link=10.0, vram=100.0, dram=20.0, dense_ms=1.0, hand_us=100.0, share=1.0)


def one_layer(experts: list[int], phases: list[int] | None = None) -> RoutingTrace:
    n = len(experts)
    return RoutingTrace(
        "tiny",
        (4,),
        (10 * MB,),
        np.array(experts, np.int32).reshape(n, 1, 1),
        np.ones(n, np.int32),
        np.array(phases or [Phase.GENERATED] * n, np.uint8),
        np.zeros(n, np.int32),
    )


class Scripted:
    """Begins with experts and swaps when it is told to."""

    def __init__(self, first: list[int], swaps: dict[int, tuple[int, int]]) -> None:
        self._first, self._swaps, self.n_calls = first, swaps, 0
        self.seen: list[int] = []

    def used(self, choices: np.ndarray) -> None:
        self.seen += choices.reshape(-1).tolist()

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        return iter([(0, expert) for expert in self._first])

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        self.n_calls += 1
        swap = self._swaps.get(self.n_calls - 1)
        return Rows.of([swap] if swap and most > 0 else [])


def test_hits_and_misses_take_their_time() -> None:
    trace = one_layer([0, 1, 0, 0])
    outcome = replay(trace, layer_slots(trace, [1]), RATES, lambda _: Scripted([0], {}), warm_up=0)
    assert (outcome.hits, outcome.misses) == (3, 1)
    # dense 1 ms each; a hit of 10 MB at 100 GB/s 0.1 ms, a miss at 10 GB/s 1 ms and 0.1 to hand it
    assert outcome.ms == pytest.approx(4 * 1.0 + 3 * 0.1 + 1.1)
    assert outcome.missed_bytes == 10 * MB and outcome.uploaded_bytes == 0


def test_an_upload_waits_for_the_readers_of_its_slot_and_for_the_link() -> None:
    # Decided in step 1: step 2 is the first without expert 0, and while it runs the copy starts,
    # which takes 1 ms of its 2.1; step 3 is the first that finds expert 1.
    trace = one_layer([1, 1, 1, 1, 1, 1])
    policy = Scripted([0], {1: (1, 0)})
    outcome = replay(trace, layer_slots(trace, [1]), RATES, lambda _: policy, warm_up=0)
    assert outcome.hits == 3 and outcome.uploaded_bytes == 10 * MB
    assert policy.seen == [1] * 5  # the last step's come too late for a decision


def test_an_upload_slows_the_cpu_only_beyond_the_memory_s_rate() -> None:
    trace, slow = one_layer([1, 1, 1, 1, 1, 2, 2]), replace(RATES, dram=15.0)

    def ms(rates: Rates) -> float:
        policy = Scripted([0], {1: (1, 0)})
        return replay(trace, layer_slots(trace, [1]), rates, lambda _: policy, warm_up=0).ms

    # The copy takes 1 ms of the 2.1 ms of step 2; the CPU then has 5 GB/s instead of 10.
    share = 1.0 / 2.1
    cpu = 10.0 * (1 - share) + 5.0 * share
    assert ms(slow) - ms(RATES) == pytest.approx(10 / cpu - 1.0)


def test_prompts_inform_and_do_not_count() -> None:
    trace = one_layer([3, 0, 0], [Phase.PROMPT, Phase.GENERATED, Phase.GENERATED])
    policy = Scripted([0], {})
    outcome = replay(trace, layer_slots(trace, [1]), RATES, lambda _: policy, warm_up=0)
    assert (outcome.hits, outcome.misses, outcome.n_tokens) == (2, 0, 2)
    assert policy.seen == [3, 0]


def test_slots_are_shared_by_layers_of_one_size() -> None:
    trace = synthetic_trace("local-128", 60)
    assert shared_slots(trace, 0.25).per_class == {0: 1536}
    assert equal_slots(trace, 0.25).per_class == dict.fromkeys(range(48), 32)
    assert marginal_slots(trace, 0.25).n_slots == 1536


def test_slots_that_pay_only_together_are_bought_together() -> None:
    curve = np.array([0.0, 0.0, 0.6, 0.7, 0.7])
    assert falling_gains(curve) == pytest.approx([0.3, 0.3, 0.1, 0.0])


def test_the_default_beats_the_seed_and_lru_where_routing_is_local() -> None:
    trace, ms, rates = synthetic_trace("local-128", 500), {}, MACHINES["desktop"]
    for name in ("fitted (default)", "seed", "lru"):
        contender = CONTENDERS[name]
        slots = contender.slots(trace, 0.25)
        outcome = replay(trace, slots, rates, contender.make(rates), most_uploads=32)
        ms[name] = outcome.ms_per_token
    assert ms["fitted (default)"] < ms["seed"] < ms["lru"]


def test_the_routers_have_the_published_locality() -> None:
    local = synthetic_trace("local-512", 700)
    curve = lru_curve(local, 300)
    assert abs(curve[64] - 0.67) < 0.03 and abs(curve[128] - 0.81) < 0.03
    skewed = synthetic_trace("skewed-256", 700)
    assert lru_curve(skewed, 300)[26] < 0.18
    assert abs(most_used_share(skewed, 26) - 0.46) < 0.04


def test_the_command_writes_tables_a_plot_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for seed in range(2):
        save_trace(tmp_path / f"{seed}.trace", synthetic_trace("skewed-256", 300, seed))
        files.append(str(tmp_path / f"{seed}.trace"))
    joined = "+".join(files) + ":100"
    assert trace_of(joined, 0).n_tokens == 600
    words = [joined, "--slots", "10,20", "--policy", "lru", "--policy", "fitted (default)",
             "--out", str(tmp_path / "r.json"), "--plot", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Belady's bound" in printed and "fitted (default)" in printed
    result = json.loads((tmp_path / "r.json").read_text())
    assert [case["slots"] for case in result["cases"]] == [0.1, 0.2]
    for case in result["cases"]:
        for row in case["policies"].values():
            assert 0 < row["hit_rate"] <= case["belady_hit_rate"] < 1
    assert (tmp_path / "0+1-100.svg").read_text().startswith("<svg")
