"""AheadExecutor: a fake device that chooses tokens, and computes as late as it can."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from ops.gpu.sampling import MAX_K, candidates_reference, edited, sample_reference
from runtime.engine.fake_executor import FakeExecutor
from runtime.engine.philox import uniform
from runtime.engine.step import F32, Chosen, Step, StepKind, StepResult
from runtime.errors import EngineBug


@dataclass(eq=False)
class FakeStepInFlight:
    """A step that is computed when its result, or that of a later one, is wanted."""

    executor: AheadExecutor
    step: Step
    given: StepResult | None = None

    async def result(self) -> StepResult:
        await asyncio.sleep(0)
        while self.given is None:
            await self.executor.pass_gate()
            self.executor.compute_first()
        return self.given


class AheadExecutor(FakeExecutor):
    """Steps are in flight until somebody waits: whatever the host does too early shows.

    n_ahead       steps that began while another was in flight
    runs_ahead    whether they may
    """

    runs_ahead = True

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.n_ahead = self.n_sampled = 0
        self._flights: deque[FakeStepInFlight] = deque()
        self._tokens: list[int] | None = None  # of the step before, where it chose any

    def samples(self, step: Step) -> bool:
        works = step.sampling or ()
        return step.kind is StepKind.DECODE and len(works) == len(step.output_tokens)

    async def begin(self, step: Step) -> FakeStepInFlight:
        if len(self._flights) > (1 if step.follows else 0):
            raise EngineBug("a step began too early")
        if step.sampling is None or self.is_closed:
            raise EngineBug("a step without samplers, or after the end")
        self.n_ahead += bool(self._flights)
        self.n_sampled += 1
        flight = FakeStepInFlight(self, step)
        self._flights.append(flight)
        return flight

    async def run(self, step: Step) -> StepResult:
        if self._flights:
            raise EngineBug("a step came while another was in flight")
        self._tokens = None
        return await super().run(step)

    def save_pages(self, pages: list[int]) -> bytes:
        if self._flights:
            raise EngineBug("pages are saved while a step is in flight")
        return super().save_pages(pages)

    def load_pages(self, pages: list[int], image: bytes) -> None:
        if self._flights:
            raise EngineBug("pages are loaded while a step is in flight")
        super().load_pages(pages, image)

    async def pass_gate(self) -> None:
        """Wait where a test holds steps."""
        if self._gate is not None:
            await self._gate.wait()

    def compute_first(self) -> None:
        """Compute the step that has been in flight longest."""
        flight = self._flights.popleft()
        step, fails = self._resolved(flight.step), self._fail_if
        self.fail_when(None)
        logits = self._perform(step).logits
        self.fail_when(fails)
        wrong = tuple(
            row for row in range(step.n_tokens) if fails is not None and fails(_alone(step, row))
        )
        chosen = _chosen(step, logits)
        self._tokens = chosen.tokens
        flight.given = StepResult(logits[:, :0], wrong, chosen)

    def _resolved(self, step: Step) -> Step:
        """`step` with the tokens that stand for what the step before chose."""
        if not step.follows:
            return step
        if self._tokens is None or step.token_ids.max() >= 0:
            raise EngineBug("a step follows one that chose nothing")
        ids = [self._tokens[-1 - token] for token in step.token_ids.tolist()]
        return replace(step, token_ids=np.array(ids, np.int32))


def _alone(step: Step, row: int) -> Step:
    """The step of one of its sequences."""
    first = np.zeros(1, np.int32)
    here = slice(row, row + 1)
    ids, positions, tables = step.token_ids[here], step.positions[here], step.page_tables[here]
    return Step(step.kind, ids, positions, first, tables, first)


def _chosen(step: Step, logits: F32) -> Chosen:
    """What a device makes of the works of all outputs."""
    works = step.sampling or ()
    ids = np.full((len(works), MAX_K), -1, np.int32)
    values = np.zeros((len(works), MAX_K), np.float32)
    tokens: list[int] = []
    for row, work in enumerate(works):
        best, best_logits = candidates_reference(
            edited(logits[row], work.edits, work.penalties[0]), work.k
        )
        ids[row, : len(best)], values[row, : len(best)] = best, best_logits
        index = 0
        if work.chain is not None:
            (chain,) = work.chain
            number = uniform(int(chain["seed"]), int(chain["position"]))
            index = sample_reference(best_logits, chain, number)
        tokens.append(int(best[index]))
    if all(work.k == 1 and not len(work.edits) for work in works):
        return Chosen(tokens)
    return Chosen(tokens, ids, values)
