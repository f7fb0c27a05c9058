"""Notices: told once, counted always, in the order in which they came up."""

from __future__ import annotations

import logging

import pytest

from runtime.notices import Notice, Notices, Reason


def test_a_text_is_told_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    with caplog.at_level(logging.INFO, logger="runtime.notices"):
        for _ in range(3):
            notices.add(Reason.SHRUNK, "12 slots")
        notices.add(Reason.SHRUNK, "6 slots")
        notices.add(Reason.CPU, "no GPU", usual=True)
    assert notices.all == (
        Notice(Reason.SHRUNK, "12 slots", 3),
        Notice(Reason.SHRUNK, "6 slots", 1),
        Notice(Reason.CPU, "no GPU", 1),
    )
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "shrunk: 12 slots"),
        ("WARNING", "shrunk: 6 slots"),
        ("INFO", "cpu: no GPU"),
    ]
    assert notices.totals[Reason.SHRUNK] == 4 and notices.totals[Reason.UNPINNED] == 0
    assert set(notices.totals) == set(Reason)
    assert notices.describe()[0] == {"reason": "shrunk", "text": "12 slots", "count": 3}
