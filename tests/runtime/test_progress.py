"""Progress where there is nobody to show it to."""

from __future__ import annotations

from contextlib import redirect_stderr

import runtime


def test_a_closed_standard_error_is_no_reason_to_fail() -> None:
    with redirect_stderr(None), runtime.ProgressBar() as progress:
        progress.start("loading", 4, "B")
        progress.advance(3)
        assert progress.state.fraction == 0.75
