"""Summaries of steps: the lines of GGML_SCHED_PROF=1, and what `python -m runtime.trace` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runtime.experts.totals import ExpertTotals
from runtime.profiling.instrument import Instrument
from runtime.profiling.record import Part, StepRecord, StepSort, added

PREFIX = "sched-prof:"
EVERY = 64
"""Decode steps from one summary to the next."""


@dataclass
class Account:
    """Steps of one sort, added up.

    seconds        of all steps; timed_seconds and parts of those that were timed and are typical
    """

    sort: StepSort
    n_steps: int = 0
    n_tokens: int = 0
    n_outputs: int = 0
    seconds: float = 0.0
    n_timed: int = 0
    n_timed_tokens: int = 0
    timed_seconds: float = 0.0
    parts: dict[Part, float] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        self.n_steps += 1
        self.n_tokens += record.n_tokens
        self.n_outputs += record.n_outputs
        self.seconds += record.seconds
        if record.parts and not record.fresh:
            self.n_timed += 1
            self.n_timed_tokens += record.n_tokens
            self.timed_seconds += record.seconds
            self.parts = added([self.parts, record.parts])

    def line(self) -> str:
        """One line: how long a token took, and each part's milliseconds of that.

        Of prompts everything is for 1000 tokens, else for a step, which has a token a sequence.
        """
        is_prompt = self.sort is StepSort.PROMPT
        units = self.n_tokens / 1000 if is_prompt else self.n_steps
        timed = self.n_timed_tokens / 1000 if is_prompt else self.n_timed
        noun = "1000 prompt tokens" if is_prompt else "step"
        head = (
            f"{self.n_tokens} {self.sort.value} tokens in {self.n_steps} steps, "
            f"{_ms(self.seconds, units)} ms a {noun}"
        )
        if not self.n_timed:
            return f"{head}; none timed"
        shares = ", ".join(
            f"{part.value} {_ms(seconds, timed)}" for part, seconds in self.parts.items()
        )
        return f"{head}; {self.n_timed} timed, {_ms(self.timed_seconds, timed)} ms: {shares}"


class Accounts:
    """An account for each sort of step."""

    def __init__(self) -> None:
        self._prompts, self._decoded = Account(StepSort.PROMPT), Account(StepSort.DECODE)

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Accounts:
        """All of them added up."""
        accounts = cls()
        for record in records:
            accounts.add(record)
        return accounts

    def add(self, record: StepRecord) -> None:
        is_decode = record.sort is StepSort.DECODE
        (self._decoded if is_decode else self._prompts).add(record)

    @property
    def held(self) -> list[Account]:
        """Those with steps."""
        return [account for account in (self._prompts, self._decoded) if account.n_steps]

    def lines(self) -> list[str]:
        return [account.line() for account in self.held]


class SchedProf(Instrument):
    """Shows lines every so many decode steps, and at the end.

    show    gets each line
    totals  reads what became of the experts; None: the GPU holds them all, or there is none
    """

    def __init__(
        self,
        show: Callable[[str], object],
        totals: Callable[[], ExpertTotals | None] = lambda: None,
        every: int = EVERY,
    ) -> None:
        self._show, self._read, self._every = show, totals, every
        self._accounts = Accounts()
        self._totals = totals()
        self._n_decoded = 0

    def step_ended(self, record: StepRecord) -> None:
        self._accounts.add(record)
        self._n_decoded += record.sort is StepSort.DECODE
        if self._n_decoded >= self._every:
            self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        held = self._accounts.held
        lines = [account.line() for account in held]
        totals = self._read()
        if totals is not None and held:
            new = totals if self._totals is None else totals.since(self._totals)
            if new.hits + new.misses:
                lines.append(expert_line(new, sum(account.n_steps for account in held)))
        for line in lines:
            self._show(f"{PREFIX} {line}")
        self._accounts, self._n_decoded, self._totals = Accounts(), 0, totals


def expert_line(new: ExpertTotals, n_steps: int) -> str:
    """What became of the experts in so many steps."""
    uploaded = sum(link.uploaded for link in new.links)
    others = sum(link.in_place + link.fetched for link in new.links)
    return (
        f"experts: {100 * new.hit_rate:.1f} % hits; misses a step {new.misses / n_steps:.1f} "
        f"(CPU {new.cpu / n_steps:.1f}, in place {new.in_place / n_steps:.1f}, "
        f"fetched {new.fetched / n_steps:.1f}); MB a step: CPU {_mb(new.cpu_bytes, n_steps)}, "
        f"link {_mb(others, n_steps)}; {new.swaps} swaps, {_mb(uploaded, 1)} MB; CPU team a step: "
        f"busy {_ms(new.cpu_seconds, n_steps)} ms, waiting {_ms(new.wait_seconds, n_steps)} ms"
    )


def _ms(seconds: float, units: float) -> str:
    """Milliseconds of a unit, three digits or so."""
    value = 1e3 * seconds / units if units else 0.0
    return f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def _mb(n_bytes: int, units: int) -> str:
    return f"{n_bytes / 1e6 / units:.1f}"
