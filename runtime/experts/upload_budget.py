"""UploadBudget: how many experts may set out for the GPU while a step runs."""

from __future__ import annotations

import time
from collections.abc import Callable

LINK_SHARE = 0.5
"""Of a step's time in which experts may be on their way; see docs/routing.md. They come out of the
same memory that the CPU reads what is missed from."""
FIRST = 4
"""Until it is known what a step and an upload take."""
PENDING_STEPS = 4
"""Steps from a decision to the first one that finds the expert in its slot."""
LONGEST_STEP_SECONDS = 0.02
"""What takes longer is a prompt, or time without a step."""
NEWEST_SHARE = 0.1


class UploadBudget:
    """most: uploads a step, whatever was measured."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self._began = self._step_seconds = 0.0

    def step_begins(self) -> None:
        """Measures how steps follow each other."""
        now = self._clock()
        seconds, self._began = now - self._began, now
        if seconds < LONGEST_STEP_SECONDS:
            share = NEWEST_SHARE if self._step_seconds else 1.0
            self._step_seconds += share * (seconds - self._step_seconds)

    def a_step(self, upload_seconds: float) -> int:
        """Uploads that may set out in a step; upload_seconds of one, 0: not known."""
        if not (upload_seconds and self._step_seconds):
            return min(self._most, FIRST)
        wanted = int(LINK_SHARE * self._step_seconds / upload_seconds)
        return min(self._most, max(wanted, 1))

    @staticmethod
    def decisions(most: int, n_pending: int, *, pinned: bool) -> int:
        """Uploads that may be decided on in a step in which `most` may set out, while n_pending are
        on their way or wait.

        Slots of experts that wait are empty, so they wait no longer than they have to; those that
        are not `pinned` come one after the other as they are read.
        """
        n_steps = PENDING_STEPS if pinned else 1
        return max(min(most, n_steps * most - n_pending), 0)
