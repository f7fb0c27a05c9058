"""Progress: where long work stands; written by the thread that works, read by anyone."""

from __future__ import annotations

import sys
import time
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

WAITING = "waiting"
"""The phase before any work has begun."""

LOOK_SECONDS = 0.02
"""Between looks at another thread's work."""


@dataclass(frozen=True)
class ProgressState:
    """A reading: `done` of `total` units (total 0: unknown) of `phase`, begun `seconds` ago."""

    phase: str
    done: int
    total: int
    unit: str
    seconds: float

    @property
    def fraction(self) -> float | None:
        """0 to 1, or None where the total is unknown."""
        return min(self.done / self.total, 1.0) if self.total else None


class Progress:
    """The silent kind: it only remembers.  One thread works, so nothing here needs a lock."""

    def __init__(self) -> None:
        self._now = (WAITING, 0, 0, "")
        self._since = time.monotonic()
        self._is_cancelled = False

    def start(self, phase: str, total: int = 0, unit: str = "") -> None:
        """Begin `phase`, which takes `total` units; whatever ran before has ended.

        Raises: CancelledError after `cancel`, as `advance` does: the work has lost its caller.
        """
        self._check()
        self._since = time.monotonic()
        self._now = (phase, 0, total, unit)

    def advance(self, n: int = 1) -> None:
        """`n` more units of the phase are done."""
        self._check()
        phase, done, total, unit = self._now
        self._now = (phase, done + n, total, unit)

    def finish(self, phase: str = "ready") -> None:
        """The whole work has ended."""
        self._since = time.monotonic()
        self._now = (phase, 0, 0, "")

    def cancel(self) -> None:
        """Nobody wants the work any more: its thread stops at its next `start` or `advance`."""
        self._is_cancelled = True

    def _check(self) -> None:
        if self._is_cancelled:
            raise CancelledError

    @property
    def state(self) -> ProgressState:
        return ProgressState(*self._now, time.monotonic() - self._since)


def follow(work: Future[Any], source: Progress, target: Progress) -> None:
    """Show what another thread's work tells `source`, until it ends.

    Raises: CancelledError once nobody wants what `target` shows.
    """
    phase, n_shown = "", 0
    ended = False
    while not ended:
        ended = bool(wait([work], LOOK_SECONDS).done)
        state = source.state
        if state.phase not in (phase, WAITING):
            phase, n_shown = state.phase, 0
            target.start(phase, state.total, state.unit)
        target.advance(state.done - n_shown)
        n_shown = state.done


class ProgressBar(Progress):
    """Also draws one bar per phase on standard error, where that is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None

    def start(self, phase: str, total: int = 0, unit: str = "") -> None:
        super().start(phase, total, unit)
        self._close_bar()
        if total:
            from tqdm import tqdm

            # disable=None: no bar where standard error is a file or a pipe; it may also be closed
            self._bar = tqdm(
                desc=phase,
                total=total,
                unit=unit or "it",
                unit_scale=unit == "B",
                disable=None if sys.stderr is not None else True,
                leave=False,
            )

    def advance(self, n: int = 1) -> None:
        super().advance(n)
        if self._bar is not None:
            self._bar.update(n)

    def finish(self, phase: str = "ready") -> None:
        super().finish(phase)
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_bar()
