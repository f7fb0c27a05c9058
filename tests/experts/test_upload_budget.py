"""How many experts may set out in a step: what was measured, and within limits."""

from __future__ import annotations

import pytest

from runtime.experts.upload_budget import FIRST, LINK_SHARE, PENDING_STEPS, UploadBudget


def after_steps(most: int, *gaps: float) -> UploadBudget:
    """A budget that has seen steps begin so many seconds apart."""
    now = 100.0
    times = iter([now, *(now := now + gap for gap in gaps)])
    budget = UploadBudget(most, lambda: next(times))
    for _ in range(1 + len(gaps)):
        budget.step_begins()
    return budget


def test_it_begins_small_until_both_times_are_known() -> None:
    assert after_steps(24).a_step(50e-6) == FIRST
    assert after_steps(24, 4e-3).a_step(0.0) == FIRST
    assert after_steps(2).a_step(0.0) == 2


@pytest.mark.parametrize(
    ("seconds", "expected"), [(100e-6, 20), (200e-6, 10), (1e-6, 24), (1.0, 1)]
)
def test_uploads_fill_a_share_of_the_steps_time(seconds: float, expected: int) -> None:
    budget = after_steps(24, 4e-3, 4e-3)
    assert LINK_SHARE == 0.5
    assert budget.a_step(seconds) == expected


def test_prompts_and_pauses_do_not_count_as_steps() -> None:
    budget = after_steps(24, 4e-3, 5.0, 4e-3)
    assert budget.a_step(200e-6) == 10


def test_nothing_is_decided_on_while_too_much_waits() -> None:
    decisions = UploadBudget.decisions
    assert decisions(10, 0, pinned=True) == 10
    assert decisions(10, 10 * PENDING_STEPS - 3, pinned=True) == 3
    assert decisions(10, 100, pinned=True) == 0
    assert decisions(10, 8, pinned=False) == 2


def test_none_is_none() -> None:
    budget = after_steps(0, 4e-3)
    assert budget.a_step(100e-6) == 0
    assert budget.decisions(0, 0, pinned=True) == 0
