"""Instrument: what a script attaches to an engine to see its steps.

    class Slowest(runtime.Instrument):
        def step_ended(self, record):
            ...

    engine.attach(Slowest())

Every hook is optional and is called on the engine's event loop between steps, so it has to be
quick. One that raises is detached, and the log says why; the engine goes on.
"""

from __future__ import annotations

from runtime.profiling.record import StepRecord, StepSort


class Instrument:
    """Does nothing; override what you want to see."""

    def step_begins(self, number: int, sort: StepSort, n_tokens: int) -> None:
        """Step `number` is handed to the executor; on a GPU the one before may still run."""

    def step_ended(self, record: StepRecord) -> None:
        """A step has ended.  Its tokens' callers have not been told yet."""

    def close(self) -> None:
        """It was detached, or the engine ends.  Called once, on any thread; may take time."""
