"""Progress where there is nobody to show it to, and of work on another thread."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import redirect_stderr
from threading import Event

import pytest

import runtime
from runtime.progress import follow


def test_a_closed_standard_error_is_no_reason_to_fail() -> None:
    with redirect_stderr(None), runtime.ProgressBar() as progress:
        progress.start("loading", 4, "B")
        progress.advance(3)
        assert progress.state.fraction == 0.75


def test_work_of_another_thread_is_shown_until_it_ends() -> None:
    source, go_on = runtime.Progress(), Event()

    class Seen(runtime.Progress):
        def start(self, phase: str, total: int = 0, unit: str = "") -> None:
            super().start(phase, total, unit)
            go_on.set()

    shown = Seen()

    def work() -> None:
        source.start("compiling", 3, "kernel")
        assert go_on.wait(10)
        source.advance(3)

    with ThreadPoolExecutor(1) as threads:
        follow(threads.submit(work), source, shown)
    state = shown.state
    assert (state.phase, state.done, state.total, state.unit) == ("compiling", 3, 3, "kernel")


def test_who_lost_interest_does_not_follow() -> None:
    shown, go_on = runtime.Progress(), Event()
    shown.cancel()
    with ThreadPoolExecutor(1) as threads:
        try:
            with pytest.raises(CancelledError):
                follow(threads.submit(go_on.wait, 10), runtime.Progress(), shown)
        finally:
            go_on.set()
