"""Profiler: puts a record together for every step, and hands it to the instruments.

Timing a step costs a GPU up to two microseconds for each border between parts, so only some steps
are timed: of each `EVERY` that decode the last `TIMED`, of which the first one is not used, since
something may have to be made for it. Prompts are timed always: theirs are long.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from runtime.profiling.instrument import Instrument
from runtime.profiling.record import (
    NO_PARTS,
    Choosing,
    Part,
    StepRecord,
    StepSort,
    StepTimes,
    added,
)

logger = logging.getLogger(__name__)

EVERY, TIMED = 64, 5


@runtime_checkable
class TimedExecutor(Protocol):
    """An executor that can tell where a step's time goes."""

    timed: bool
    """Whether steps that begin from now on are timed."""

    def take_times(self) -> list[StepTimes]:
        """Of the launches of the step that ended last, in order; none if it was not timed."""
        ...


class Profiler:
    """Told by the step loop what happens; instruments may come and go between steps.

    Of a step that is not timed it takes 2 to 4 us.
    """

    def __init__(self, executor: object, *, every: int = EVERY, n_timed: int = TIMED) -> None:
        self._timing = executor if isinstance(executor, TimedExecutor) else None
        self._every, self._first = every, every - n_timed
        self._first_used = self._first + min(1, n_timed - 1)
        self._instruments: list[Instrument] = []
        self._watching: list[Instrument] = []  # those that want to see beginnings
        self._n_steps = self._n_decoded = 0
        self._since = time.perf_counter()
        # Of each step in flight: number, sort, tokens, whether it is timed and whether that counts
        self._flying: deque[tuple[int, StepSort, int, bool, bool]] = deque()
        self._choices: list[Choosing] = []

    def woke(self) -> None:
        """There is work again: what was before belongs to no step."""
        if not self._flying:
            self._since = time.perf_counter()
            self._choices.clear()

    def begins(self, sort: StepSort, n_tokens: int) -> None:
        """A step is about to begin."""
        timed = used = True
        if sort is StepSort.DECODE:
            place = self._n_decoded % self._every
            timed, used = place >= self._first, place >= self._first_used
            self._n_decoded += 1
        if self._timing is not None:
            self._timing.timed = timed
        number = self._n_steps
        self._n_steps = number + 1
        self._flying.append((number, sort, n_tokens, timed, used))
        for instrument in tuple(self._watching):
            try:
                instrument.step_begins(number, sort, n_tokens)
            except Exception:
                self._fail(instrument)

    def did_not_begin(self) -> None:
        """The step that was about to begin last did not."""
        if self._flying:
            self._flying.pop()

    def ended(self, n_outputs: int) -> None:
        """The first step in flight has ended, well or not."""
        now = time.perf_counter()
        if not self._flying:  # it began before anybody looked
            self._since = now
            return
        number, sort, n_tokens, timed, used = self._flying.popleft()
        began, self._since = self._since, now
        record = StepRecord(number, sort, n_tokens, n_outputs, began, now, NO_PARTS)
        if self._choices:
            record.choices = tuple(self._choices)
            self._choices.clear()
        if timed and self._timing is not None:
            _break_down(record, self._timing.take_times())
            record.fresh = record.fresh or not used
        for instrument in tuple(self._instruments):
            try:
                instrument.step_ended(record)
            except Exception:
                self._fail(instrument)

    def answered(self, began: float) -> None:
        """Tokens were chosen and made into text since `began`: part of the step that comes next."""
        self._choices.append((began, time.perf_counter() - began))

    def attach(self, instrument: Instrument) -> None:
        self._instruments.append(instrument)
        hook = instrument.step_begins
        if getattr(hook, "__func__", hook) is not Instrument.step_begins:
            self._watching.append(instrument)

    def detach(self, instrument: Instrument) -> bool:
        """Let one go; True if nobody looks any more, and no step is timed from now on."""
        if instrument in self._instruments:
            self._forget(instrument)
            _close(instrument)
        if not self._instruments and self._timing is not None:
            self._timing.timed = False
        return not self._instruments

    def close(self) -> None:
        """Let all instruments go."""
        for instrument in tuple(self._instruments):
            self.detach(instrument)

    def _fail(self, instrument: Instrument) -> None:
        """Called where a hook has raised: the instrument is out."""
        logger.exception("%s is detached: a hook of it failed", instrument)
        self._forget(instrument)
        _close(instrument)

    def _forget(self, instrument: Instrument) -> None:
        for known in (self._instruments, self._watching):
            if instrument in known:
                known.remove(instrument)


def _break_down(record: StepRecord, times: list[StepTimes]) -> None:
    """Give the record its parts: what the launches say, the host's before, and what is left."""
    if not times:
        return
    # A step that begins behind another one leaves the host's work out: nobody waits for it.
    record.waited = waited = max(times[0].launched - record.began, 0.0)
    parts = added(launch.parts for launch in times)
    if waited:
        chosen = min(sum(seconds for _, seconds in record.choices), waited)
        parts |= {Part.SAMPLING: chosen, Part.HOST: waited - chosen}
    rest = record.ended - record.began - sum(parts.values())
    record.parts = added([parts, {Part.LAUNCH: rest}])
    record.launches = tuple(times)
    record.fresh = any(launch.fresh for launch in times)


def _close(instrument: Instrument) -> None:
    try:
        instrument.close()
    except Exception:
        logger.exception("%s did not close", instrument)
