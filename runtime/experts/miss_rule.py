"""MissRule: who serves missed experts, decided by what each way takes and kept only where it wins.

The CPU team serves all of them, unless rates say that the link should help. Then that is tried:
steps are timed without it, and with it, and it stays if they become quicker by `LEAST_GAIN`.
Whatever was found is looked at again when rates or hits have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from statistics import median

from runtime.errors import ConfigError
from runtime.experts.miss_rates import EVERY, F64, LEAST_GAIN, MissRates

TRIAL_STEPS = 48
"""That are timed each way; steps differ by what they miss."""
CLEAR_STEPS, CLEAR_LOSS = 12, 0.1
"""A trial whose steps, so many at least, are slower by more than that is over."""
REST_STEPS, MOST_DOUBLED = 2048, 4
"""Until it is tried again; twice as many after each trial lost in a row, so many times."""
UNREADABLE = "not every expert is pinned, or no kernel reads their format"
ASKED_FOR = "asked for"
CPU = "cpu"
AUTO = "auto"


class _Phase(Enum):
    RESTING = auto()
    WITHOUT = auto()
    WITH = auto()


def rule_in(text: str | None) -> int | None:
    """`auto` (None), `cpu` (0), or a number: each so many'th miss is read in place.

    Raises: ConfigError.
    """
    if text is None or text == AUTO:
        return None
    if text == CPU:
        return 0
    if text.isdigit() and int(text) in EVERY:
        return int(text)
    numbers = ", ".join(map(str, EVERY))
    raise ConfigError(f"misses = {text[:40]!r} of the expert cache: use {AUTO}, {CPU}, {numbers}")


class MissRule:
    """given: what was asked for, see `rule_in`; rates: as measured at the start, then corrected by
    what steps show."""

    def __init__(self, rates: MissRates, given: int | None = None) -> None:
        self.rates, self._given = rates, given
        self.every = 0
        """What is in force."""
        self.why = ASKED_FOR if given is not None else "not looked at yet"
        self._phase, self._tried = _Phase.RESTING, 0
        self._times: list[float] = []
        self._without = 0.0
        self._rest = 0
        self._n_lost = 0  # trials in a row

    def took(self, seconds: float) -> None:
        """A step that generated a token took so long."""
        if self._phase is not _Phase.RESTING:
            self._times.append(seconds)
        elif self._rest:
            self._rest -= 1

    def wanted(self, seen: Callable[[MissRates], tuple[MissRates, F64]]) -> int | None:
        """The rule from the next step on; None: as it is.  Asked between steps.

        seen: what the rates are by now, and what tokens miss (see `MissRates.of_token`)
        """
        if self._given is not None:
            return None if self._rest else self._changed(self._given)
        if self._phase is _Phase.RESTING:
            return self._look(seen) if not self._rest else None
        if len(self._times) < TRIAL_STEPS and not self._loses():
            return None
        found, self._times = median(self._times), []
        if self._phase is _Phase.WITHOUT:
            self._phase, self._without = _Phase.WITH, found
            return self._changed(self._tried)
        gain = 1 - found / self._without
        self._phase, self._rest = _Phase.RESTING, REST_STEPS << min(self._n_lost, MOST_DOUBLED)
        self._n_lost = 0 if gain >= LEAST_GAIN else self._n_lost + 1
        self.why = f"tried one of {self._tried} in place: steps {100 * gain:+.1f} % quicker"
        return self._changed(self._tried if gain >= LEAST_GAIN else 0)

    def _loses(self) -> bool:
        """Whether the trial needs no more steps."""
        if self._phase is not _Phase.WITH or len(self._times) < CLEAR_STEPS:
            return False
        return median(self._times) > (1 + CLEAR_LOSS) * self._without

    def answered(self, every: int, *, done: bool) -> str | None:
        """What was wanted is in force, or cannot be; returns what the user, who asked for it, has
        to know."""
        self.every = every if done else 0
        if done:
            self.why = self.why if self._given is None else ASKED_FOR
            return None
        self._phase, self._rest, self._times = _Phase.RESTING, TRIAL_STEPS, []
        self.why = f"one of {every} in place cannot be: {UNREADABLE}"
        if self._given is None:
            return None
        return f"misses = {every}: the CPU serves all of them: {UNREADABLE}"

    def _look(self, seen: Callable[[MissRates], tuple[MissRates, F64]]) -> int | None:
        self.rates, spread = seen(self.rates)
        if not spread[1:].any():
            self._rest = TRIAL_STEPS
            return None
        best = self.rates.best(spread)
        if best in (0, self.every):
            self._rest = REST_STEPS
            self.why = self._expectation(spread)
            return self._changed(best)
        self._phase, self._tried = _Phase.WITHOUT, best
        self.why = f"one of {best} in place is being tried"
        return self._changed(0)

    def _expectation(self, spread: F64) -> str:
        if not self.rates.link_beside:
            return "the link cannot carry experts, or was not measured"
        alone = self.rates.of_token(spread, 0)
        helped = min(self.rates.of_token(spread, every) for every in EVERY)
        return f"misses take {alone:.0f} us a token by the CPU, {helped:.0f} with the link's help"

    def _changed(self, every: int) -> int | None:
        if every == self.every:
            return None
        return every

    def describe(self) -> dict[str, object]:
        """For people."""
        who = "the CPU" if not self.every else f"the CPU, one of {self.every} in place"
        rule = f"{who}: {self.why}"
        return {"expert_misses": rule, "expert_miss_rates": self.rates.describe()}
