"""Executor: the one interface behind which a CPU, a GPU or a fake device performs steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.engine.step import Step, StepResult


@dataclass(frozen=True)
class ExecutorLimits:
    """What an executor was built for: counts are fixed for its lifetime."""

    n_vocab: int
    n_pages: int
    page_tokens: int
    max_step_tokens: int
    max_sequences: int


class Executor(Protocol):
    """Performs steps, one at a time, in the order of the calls; holds the KV pages."""

    @property
    def limits(self) -> ExecutorLimits: ...

    async def run(self, step: Step) -> StepResult:
        """Perform `step`; the event loop gets at least one turn before the result.

        A cancelled caller leaves the step running; the next call waits for it.

        Raises: ComputeError when the step gave numbers that are not finite.
        """
        ...

    def save_pages(self, pages: list[int]) -> bytes:
        """A host copy of the KV of `pages`, in order; only between steps."""
        ...

    def load_pages(self, pages: list[int], image: bytes) -> None:
        """Put what `save_pages` returned into as many `pages`; only between steps."""
        ...

    def describe(self) -> dict[str, object]:
        """Facts for /props and the console: device, threads, instruction set, sizes, reasons."""
        ...

    async def close(self) -> None:
        """Wait for the step in flight and release everything."""
        ...
