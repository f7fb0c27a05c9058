"""Who serves missed experts: the rates say what to try, steps say what stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.errors import ConfigError
from runtime.experts.miss_rates import F64, MissRates, rising, spread_misses
from runtime.experts.miss_rule import CLEAR_STEPS, REST_STEPS, TRIAL_STEPS, MissRule, rule_in

SLOW_CPU = MissRates((100.0, 200.0, 300.0, 400.0), (120.0, 240.0, 360.0, 480.0), 50.0, 60.0)
H200 = MissRates((37.0, 60.0, 84.0, 112.0), (45.0, 80.0, 112.0, 150.0), 55.0, 70.0)
TWO_MISSES = np.array([0.0, 0.0, 10.0])

Seen = Callable[[MissRates], tuple[MissRates, F64]]


def seen(misses: F64) -> Seen:
    return lambda rates: (rates, misses)


def test_what_is_read_in_place_is_read_beside_the_rest() -> None:
    assert SLOW_CPU.of_layer(1, 2) == 100  # the first one stays with the CPU, which is alone then
    assert SLOW_CPU.of_layer(2, 2) == 120  # one each
    assert SLOW_CPU.of_layer(4, 2) == 240
    assert SLOW_CPU.of_layer(4, 0) == 400
    assert SLOW_CPU.of_layer(6, 0) == 600  # beyond what was measured
    assert MissRates((10.0,)).of_layer(3, 0) == 30
    assert SLOW_CPU.of_token(TWO_MISSES, 2) == 1200


def test_the_link_helps_a_slow_cpu_alone() -> None:
    assert SLOW_CPU.best(TWO_MISSES) == 2
    assert SLOW_CPU.best(np.array([0.0, 40.0])) == 0  # a layer with one miss gains nothing
    assert H200.best(np.array([24.0, 20.0, 6.0, 1.0])) == 0
    assert MissRates((100.0, 200.0)).best(TWO_MISSES) == 0  # the link was not measured
    assert SLOW_CPU.corrected(0.2, 1.0).best(TWO_MISSES) == 0


def test_more_experts_take_longer() -> None:
    assert rising([30, 27, 75, 50]) == (27, 27, 50, 50)
    assert rising([10, 20]) == (10, 20)


def test_layers_miss_independently() -> None:
    spread = spread_misses([0.5, 1.0], [2, 2])
    assert spread.tolist() == [1.25, 0.5, 0.25]


def stepped(rule: MissRule, misses: F64, seconds: Callable[[int], float], n: int) -> list[int]:
    """The rule after each of n steps, which take so long by it."""
    found = []
    for _ in range(n):
        every = rule.wanted(seen(misses))
        if every is not None:
            assert rule.answered(every, done=True) is None
        found.append(rule.every)
        rule.took(seconds(rule.every))
    return found


@pytest.mark.parametrize(("with_help", "kept"), [(0.9, 2), (0.98, 0), (1.1, 0)])
def test_what_is_tried_stays_if_steps_are_quicker(with_help: float, kept: int) -> None:
    rule = MissRule(SLOW_CPU)
    took = stepped(rule, TWO_MISSES, lambda every: with_help if every else 1.0, 2 * TRIAL_STEPS + 3)
    assert took[:TRIAL_STEPS] == [0] * TRIAL_STEPS
    assert took[TRIAL_STEPS + 1 : 2 * TRIAL_STEPS] == [2] * (TRIAL_STEPS - 1)
    assert took[-1] == kept
    assert "quicker" in str(rule.describe()["expert_misses"])


def test_a_trial_that_clearly_loses_ends_at_once() -> None:
    rule = MissRule(SLOW_CPU)
    took = stepped(rule, TWO_MISSES, lambda every: 1.2 if every else 1.0, 2 * TRIAL_STEPS)
    assert sum(every > 0 for every in took) == CLEAR_STEPS


def test_trials_lost_in_a_row_are_further_and_further_apart() -> None:
    rule = MissRule(SLOW_CPU)
    took = stepped(rule, TWO_MISSES, lambda every: 1.2 if every else 1.0, 10 * REST_STEPS)
    helped = np.flatnonzero(np.array(took))
    apart = np.diff(helped[np.flatnonzero(np.diff(helped, prepend=-2) > 1)])
    assert len(apart) == 3 and all(apart[1:] - apart[:-1] == [REST_STEPS, 2 * REST_STEPS])


def test_what_is_on_trial_says_so() -> None:
    rule = MissRule(SLOW_CPU)
    for n_steps, who in ((TRIAL_STEPS, "the CPU"), (2, "the CPU, one of 2 in place")):
        stepped(rule, TWO_MISSES, lambda _: 1.0, n_steps)
        assert rule.describe()["expert_misses"] == f"{who}: one of 2 in place is being tried"


def test_the_cpu_stays_where_nothing_is_to_be_gained() -> None:
    rule = MissRule(H200)
    assert set(stepped(rule, TWO_MISSES, lambda _: 1.0, 300)) == {0}
    assert "by the CPU" in rule.why


def test_it_is_looked_at_again() -> None:
    rule = MissRule(H200)
    stepped(rule, TWO_MISSES, lambda _: 1.0, 2)
    looks = 0

    def look(rates: MissRates) -> tuple[MissRates, F64]:
        nonlocal looks
        looks += 1
        return SLOW_CPU, TWO_MISSES

    for _ in range(REST_STEPS + 2):
        rule.wanted(look)
        rule.took(1.0)
    assert looks == 1 and rule.rates is SLOW_CPU


def test_without_misses_there_is_nothing_to_decide() -> None:
    rule = MissRule(SLOW_CPU)
    assert rule.wanted(seen(np.zeros(1))) is None
    assert rule.why == "not looked at yet"


def test_what_is_asked_for_holds() -> None:
    assert rule_in(None) is None and rule_in("auto") is None
    assert rule_in("cpu") == 0 and rule_in("3") == 3
    for wrong in ("1", "gpu", "-2"):
        with pytest.raises(ConfigError, match="misses"):
            rule_in(wrong)
    rule = MissRule(SLOW_CPU, 3)
    assert rule.wanted(seen(TWO_MISSES)) == 3
    assert MissRule(SLOW_CPU, 0).wanted(seen(TWO_MISSES)) is None


def test_what_cannot_be_is_told_and_asked_for_again_later() -> None:
    rule = MissRule(SLOW_CPU, 3)
    assert rule.wanted(seen(TWO_MISSES)) == 3
    told = rule.answered(3, done=False)
    assert told is not None and "misses = 3: the CPU serves all of them: not every expert" in told
    assert "cannot be" in str(rule.describe()["expert_misses"])
    for _ in range(TRIAL_STEPS):
        assert rule.every == 0 and rule.wanted(seen(TWO_MISSES)) is None
        rule.took(0.001)
    assert rule.wanted(seen(TWO_MISSES)) == 3
    assert rule.answered(3, done=True) is None
    assert rule.describe()["expert_misses"] == "the CPU, one of 3 in place: asked for"


def test_a_trial_that_cannot_be_is_no_trial() -> None:
    rule = MissRule(SLOW_CPU)
    assert rule.wanted(seen(TWO_MISSES)) is None
    for _ in range(TRIAL_STEPS):
        assert rule.wanted(seen(TWO_MISSES)) is None
        rule.took(0.001)
    assert rule.wanted(seen(TWO_MISSES)) == 2
    assert rule.answered(2, done=False) is None  # nobody asked for it
    assert rule.every == 0 and rule.wanted(seen(TWO_MISSES)) is None
    assert "cannot be" in str(rule.describe()["expert_misses"])
