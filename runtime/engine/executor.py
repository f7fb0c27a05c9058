"""Executor: the one interface behind which a CPU, a GPU or a fake device performs steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from runtime.engine.step import Step, StepResult
from runtime.experts.totals import ExpertTotals


@dataclass(frozen=True)
class ExecutorLimits:
    """What an executor was built for: counts are fixed for its lifetime.

    n_state_slots  states of sequences that it holds, the running ones and snapshots of others; 0:
                   the model has no recurrent layers
    n_previous     tokens before a step's first one that the model looks at by itself
    """

    n_vocab: int
    n_pages: int
    page_tokens: int
    max_step_tokens: int
    max_sequences: int
    n_state_slots: int = 0
    n_previous: int = 0


class Executor(Protocol):
    """Performs steps, one at a time, in the order of the calls; holds the KV pages."""

    @property
    def limits(self) -> ExecutorLimits: ...

    async def run(self, step: Step) -> StepResult:
        """Perform `step`; the event loop gets at least one turn before the result.

        A cancelled caller leaves the step running; the next call waits for it.

        Raises: ComputeError when the step gave numbers that are not finite (but see
        `StepResult.not_finite`).
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


class StepInFlight(Protocol):
    """A step that has begun."""

    async def result(self) -> StepResult:
        """Its result, once; a cancelled caller leaves it running.  Raises: as `Executor.run`."""
        ...


@runtime_checkable
class SamplingExecutor(Executor, Protocol):
    """An executor that can choose tokens itself, and then go on without waiting for the host.

    Steps take effect in the order in which they begin: one never sees what a later one writes.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step that `follows` may begin while the one before it is in flight."""
        ...

    def samples(self, step: Step) -> bool:
        """Whether it performs `step`, which has `sampling`."""
        ...

    async def begin(self, step: Step) -> StepInFlight:
        """Begin `step`: one that `follows` behind the one in flight, any other one alone.

        Raises: as `run`; EngineBug where it follows a step that chose no tokens.
        """
        ...


@runtime_checkable
class StatefulExecutor(Executor, Protocol):
    """An executor whose models may have recurrent layers: it holds a state of each sequence too."""

    def save_state(self, slot: int) -> bytes:
        """A host copy of the state in `slot`; only between steps."""
        ...

    def load_state(self, slot: int, image: bytes) -> None:
        """Put what `save_state` returned into `slot`; only between steps."""
        ...


@runtime_checkable
class CountingExecutor(Executor, Protocol):
    """An executor whose experts move between the CPU and a GPU."""

    def expert_totals(self) -> ExpertTotals | None:
        """Who served them so far; None: with this model nothing moves."""
        ...


@runtime_checkable
class LayerCountingExecutor(Executor, Protocol):
    """An executor that knows what has computed the layers of its steps."""

    layers_computed: dict[str, int]
    """Layers of steps so far, by device, "gpu" and "cpu"; a GPU's with experts that the CPU has
    computed for it, and rows of n-gram tables that the host has gathered."""


@runtime_checkable
class ResizableExecutor(Executor, Protocol):
    """An executor whose memory for experts may change while it is open."""

    async def resize(self, vram_limit: int | None) -> int:
        """Use at most so many bytes of each GPU's memory, None: all that is free; returns the bytes
        of the experts that are there then.  Between steps; no bit of a result changes.

        Raises: ConfigError where nothing can change, or what every token needs takes more;
        PinningFailed, CudaError.
        """
        ...
