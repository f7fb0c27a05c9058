"""StepLoop: carries out what the scheduler decides, one step after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from runtime.engine.answer import Answer
from runtime.engine.executor import Executor
from runtime.engine.sampler import Choice
from runtime.engine.scheduler import Plan, Scheduler
from runtime.engine.sequence import Sequence, State
from runtime.engine.statistics import Counters
from runtime.engine.step import F32, StepKind
from runtime.errors import ComputeError, EngineBug, EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Choosing tokens from more logits than this takes over a millisecond, which the loop should not
# stand still.
INLINE_LOGITS = 50_000


class StepLoop:
    """The only caller of the executor; all bookkeeping happens on the event loop."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, helper: ThreadPoolExecutor
    ) -> None:
        """helper: one thread for whatever would hold up the event loop."""
        self.scheduler = scheduler
        self.executor = executor
        self.counters = Counters()
        self.slots: dict[int, Answer] = {}  # the last answer of each slot
        self._helper = helper
        self._answers: dict[Sequence, Answer] = {}
        self._begun: set[Sequence] = set()
        self._jobs: deque[Callable[[], Awaitable[None]]] = deque()
        self._awaited: set[asyncio.Future[Any]] = set()  # whoever waits for a job
        self._wake = asyncio.Event()

    def submit(self, answer: Answer) -> None:
        """Queue an answer; its items come through its channel."""
        self._answers[answer.sequence] = answer
        self.scheduler.add(answer.sequence)
        self._wake.set()

    def cancel(self, answer: Answer) -> None:
        """Free the sequence's pages as soon as the step in flight, if any, has ended."""
        if not answer.sequence.is_over:
            answer.sequence.cancel_wanted = True
            self._wake.set()

    async def between_steps(self, job: Callable[[], Awaitable[T]]) -> T:
        """Run `job` while no step is in flight."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            if done.done():
                return  # nobody waits any more
            try:
                result = await job()
            except EngineError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self._awaited.add(done)
        self._jobs.append(run)
        self._wake.set()
        try:
            return await done
        finally:
            self._awaited.discard(done)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the helper thread."""
        return await asyncio.get_running_loop().run_in_executor(self._helper, work)

    def fail_all(self, error: EngineError) -> None:
        """The engine ends: every caller that still waits gets `error`."""
        for answer in self._answers.values():
            answer.channel.fail(error)
        self._answers.clear()
        for waiting in self._awaited:
            if not waiting.done():
                waiting.set_exception(error)

    async def run_forever(self) -> None:
        """Step while there is work, sleep while there is none."""
        while True:
            while self._jobs:
                await self._jobs.popleft()()
            plan = self.scheduler.next_step()
            self._forget_ended()
            if plan.step is not None:
                await self._perform(plan)
                # An executor that answers at once must not keep everyone else from the loop.
                await asyncio.sleep(0)
            elif not self._jobs:
                self._wake.clear()
                await self._wake.wait()

    async def _perform(self, plan: Plan) -> None:
        step = plan.step
        if step is None:
            raise EngineBug("there is no step to perform")
        for part in plan.parts:
            self.slots[part.sequence.slot] = self._answers[part.sequence]
            if part.sequence not in self._begun:
                self._begin(part.sequence)
        if plan.saves or plan.loads:
            await self.off_loop(lambda: self._move_pages(plan))
        began = time.perf_counter()
        logits = await self._compute(plan)
        seconds = time.perf_counter() - began
        ready = self.scheduler.commit(plan, seconds)
        self._count(plan, seconds)
        if step.kind is StepKind.PREFILL:
            for part in plan.parts:
                if part.sequence in self._answers:
                    self._answers[part.sequence].report_progress()
        await self._answer(ready, logits)

    def _begin(self, sequence: Sequence) -> None:
        self._begun.add(sequence)
        self._answers[sequence].begin()
        self.counters = replace(
            self.counters,
            prompt_tokens_cached=self.counters.prompt_tokens_cached + sequence.n_cached,
        )

    def _move_pages(self, plan: Plan) -> None:
        for save in plan.saves:
            save.sequence.images = [self.executor.save_pages([page]) for page in save.pages]
            logger.debug("preempted %r: %d pages to host memory", save.sequence, len(save.pages))
        for load in plan.loads:
            for index, page in zip(load.indices, load.pages, strict=True):
                self.executor.load_pages([page], load.sequence.images[index])
            load.sequence.images.clear()

    async def _compute(self, plan: Plan) -> F32:
        """The logits of the step.  A sequence whose numbers are not finite fails alone."""
        if plan.step is None:
            raise EngineBug("there is no step to compute")
        try:
            return (await self.executor.run(plan.step)).logits
        except ComputeError as error:
            if len(plan.parts) == 1:
                self._fail(plan.parts[0].sequence, error)
                return np.empty((len(plan.step.output_tokens), 0), np.float32)
        logger.warning("a step of %d sequences failed: computing each alone", len(plan.parts))
        rows: list[F32] = []
        for part, step in self.scheduler.alone(plan):
            try:
                rows += list((await self.executor.run(step)).logits.copy())
            except ComputeError as error:
                self._fail(part.sequence, error)
                rows += [np.empty(0, np.float32)] * len(step.output_tokens)
        n_vocab = self.executor.limits.n_vocab
        logits = np.full((len(rows), n_vocab), np.nan, np.float32)
        for row, values in enumerate(rows):
            if len(values):
                logits[row] = values
        return logits

    async def _answer(self, ready: list[tuple[int, Sequence]], logits: F32) -> None:
        """Choose the next token of every sequence in `ready` and send it."""
        wanting = []
        for row, sequence in ready:
            answer = self._answers.get(sequence)
            if answer is None or sequence.cancel_wanted:
                continue
            if answer.n_remain == 0:
                answer.fill_only()
                self._end(sequence, State.FINISHED)
            else:
                wanting.append((answer, logits[row]))
        if not wanting:
            return
        n_logits = len(wanting) * self.executor.limits.n_vocab
        if n_logits <= INLINE_LOGITS:
            outcomes = [choose(answer, row) for answer, row in wanting]
        else:
            outcomes = await self.off_loop(lambda: [choose(*pair) for pair in wanting])
        for (answer, _), outcome in zip(wanting, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self._fail(answer.sequence, outcome)
            elif answer.take(outcome):
                self._end(answer.sequence, State.FINISHED)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        logger.warning("%r failed: %s", sequence, error)
        self.counters = replace(self.counters, requests_failed=self.counters.requests_failed + 1)
        if sequence in self._answers:
            self._answers[sequence].channel.fail(error)
        self._end(sequence, State.FAILED)

    def _end(self, sequence: Sequence, state: State) -> None:
        self.scheduler.end(sequence, state, poisoned=state is State.FAILED)
        self._answers.pop(sequence, None)
        self._begun.discard(sequence)

    def _forget_ended(self) -> None:
        for sequence in [s for s in self._answers if s.is_over]:
            del self._answers[sequence]
            self._begun.discard(sequence)

    def _count(self, plan: Plan, seconds: float) -> None:
        counters, step = self.counters, plan.step
        if step is None:
            return
        running = self.scheduler.running
        longest = max((len(s.tokens) for s in running), default=0)
        counters = replace(
            counters,
            busy_slots=counters.busy_slots + len(running),
            max_tokens=max(counters.max_tokens, longest),
            preemptions=self.scheduler.n_preemptions,
            predicted_tokens=counters.predicted_tokens + len(step.output_tokens),
        )
        if step.kind is StepKind.PREFILL:
            self.counters = replace(
                counters,
                prompt_steps=counters.prompt_steps + 1,
                prompt_tokens=counters.prompt_tokens + step.n_tokens,
                prompt_seconds=counters.prompt_seconds + seconds,
            )
        else:
            self.counters = replace(
                counters,
                decode_steps=counters.decode_steps + 1,
                predicted_seconds=counters.predicted_seconds + seconds,
            )


def choose(answer: Answer, logits: F32) -> Choice | EngineError:
    """The answer's next token, or why there is none."""
    try:
        return answer.sampler.choose(logits, len(answer.sequence.tokens))
    except EngineError as error:
        return error
