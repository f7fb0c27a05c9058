"""The self-check: one look, two figures, a notice only where far fewer hit than expected."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from runtime.experts.hit_check import CHECKED_TOKENS, HitCheck, check_links
from runtime.experts.totals import (
    N_KINDS,
    NOBODY,
    ON_CPU,
    ON_GPU,
    ExpertTotals,
    LinkTotals,
    RequestUse,
    StepUse,
)
from runtime.notices import Notices, Reason

BYTES = np.array([10, 100], np.int64)


def step_use(n_tokens: int, hits: int, misses: int) -> StepUse:
    """Of tokens alike: hits and misses in each of two layers."""
    counts = np.zeros((n_tokens, 2, N_KINDS), np.int64)
    counts[..., ON_GPU], counts[..., ON_CPU], counts[..., NOBODY] = hits, misses, 5
    return StepUse(counts, BYTES)


def checked(expected: float, hits: int, misses: int) -> Notices:
    """After steps of one token."""
    notices = Notices()
    check = HitCheck(expected, notices)
    for _ in range(CHECKED_TOKENS - 1):
        assert not check.see(1, [step_use(1, hits, misses)])
    assert notices.all == ()
    assert check.see(1, [step_use(1, hits, misses)])
    return notices


def test_far_fewer_hits_than_expected_are_told_with_both_figures() -> None:
    (notice,) = checked(0.75, 3, 5).all
    assert notice.reason is Reason.FEWER_HITS
    assert "37.5 %" in notice.text and "75.0 %" in notice.text


@pytest.mark.parametrize(("expected", "hits", "misses"), [(0.75, 6, 2), (0.4, 3, 5), (0.05, 0, 8)])
def test_what_is_about_right_is_a_line_of_the_log(
    expected: float, hits: int, misses: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="runtime.experts.hit_check"):
        assert checked(expected, hits, misses).all == ()
    assert f"{100 * expected:.1f} % were expected" in caplog.text


def test_a_batch_counts_with_all_of_its_tokens() -> None:
    check = HitCheck(1.0, Notices())
    assert not check.see(CHECKED_TOKENS - 1, [step_use(CHECKED_TOKENS - 1, 1, 0)])
    assert check.see(3, [step_use(3, 1, 0)])


def test_a_request_has_its_own_tokens_uses() -> None:
    """Of a step of three tokens the middle one; then a third of a prompt that is counted whole."""
    counts = np.concatenate([step_use(1, n, 1).counts for n in range(3)])
    use = RequestUse()
    use.add((StepUse(counts, BYTES),), slice(1, 2), 3)
    assert (use.uses, use.hit_rate, use.miss_bytes) == (4, 0.5, 110)
    whole = StepUse(step_use(1, 0, 3).counts, BYTES)
    use.add((whole,), slice(0, 2), 6)
    assert use.uses == 4 + 6 / 3
    assert use.hit_rate == pytest.approx(2 / 6)
    assert use.miss_bytes == pytest.approx(110 + 3 * 110 / 3)


def test_a_request_without_uses_says_nothing() -> None:
    use = RequestUse()
    assert (use.uses, use.hit_rate, use.miss_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("uploaded", "swaps", "rate", "told"),
    [
        (64 << 20, 20, 3.2, True),
        (64 << 20, 20, 24.0, False),
        (64 << 20, 20, 0.0, False),
        (64 << 20, 2000, 3.2, False),  # of small experts the copies themselves take as long
        (1 << 20, 2, 3.2, False),  # too few to judge
    ],
)
def test_a_slow_link_is_told(uploaded: int, swaps: int, rate: float, told: bool) -> None:
    notices = Notices()
    link = LinkTotals("cuda:1", uploaded=uploaded, gb_s=rate)
    check_links(ExpertTotals(swaps=swaps, links=(link,)), notices)
    assert [notice.reason for notice in notices.all] == [Reason.SLOW_LINK] * told
    assert all("cuda:1 at 3.2 GB/s" in notice.text for notice in notices.all)
