"""StepLoop: carries out what the scheduler decides, one step after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from runtime.engine.answer import Answer
from runtime.engine.executor import Executor
from runtime.engine.sampler import Choice
from runtime.engine.scheduler import Plan, Scheduler
from runtime.engine.sequence import Sequence, State
from runtime.engine.statistics import Counters
from runtime.engine.step import F32, Step, StepKind, StepResult
from runtime.errors import ComputeError, EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Choosing a token from more logits than this takes over a millisecond: it happens off the loop.
# Logits that one pass reduces to a few count once, others as the passes that they take.
INLINE_LOGITS = 200_000
SLOW_PASSES = 8
# Answering many sequences gives the loop a turn this often.
TURN_SECONDS = 1e-3


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
        self._cancelled: list[Sequence] = []
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
        sequence = answer.sequence
        if sequence in self._answers and not sequence.cancel_wanted:
            sequence.cancel_wanted = True
            self._cancelled.append(sequence)
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
            answer.channel.put(error)
        self._answers.clear()
        self._cancelled.clear()
        for waiting in self._awaited:
            if not waiting.done():
                waiting.set_exception(error)

    async def run_forever(self) -> None:
        """Step while there is work, sleep while there is none."""
        while True:
            while self._jobs:
                await self._jobs.popleft()()
            self._end_cancelled()
            plan = self.scheduler.next_step()
            if plan.step is not None:
                # Callers read the tokens of one step while the next one is computed.
                await self._perform(plan, plan.step)
            elif not self._jobs:
                self._wake.clear()
                await self._wake.wait()

    async def _perform(self, plan: Plan, step: Step) -> None:
        for part in plan.parts:
            answer = self.slots[part.sequence.slot] = self._answers[part.sequence]
            if not answer.has_begun:
                answer.begin()
                self.counters.prompt_tokens_cached += part.sequence.n_cached
        if plan.saves or plan.loads:
            await self.off_loop(lambda: self._move_pages(plan))
        began = time.perf_counter()
        logits = await self._compute(plan, step)
        seconds = time.perf_counter() - began
        ready = self.scheduler.commit(plan, seconds)
        self._count(step, seconds)
        if step.kind is StepKind.PREFILL:
            for part in plan.parts:
                if part.sequence in self._answers:
                    self._answers[part.sequence].report_progress()
        await self._answer(ready, logits)

    def _move_pages(self, plan: Plan) -> None:
        for save in plan.saves:
            save.sequence.images = [self.executor.save_pages([page]) for page in save.pages]
            logger.debug("preempted %r: %d pages to host memory", save.sequence, len(save.pages))
        for load in plan.loads:
            for index, page in zip(load.indices, load.pages, strict=True):
                self.executor.load_pages([page], load.sequence.images[index])
            load.sequence.images.clear()

    async def _compute(self, plan: Plan, step: Step) -> F32:
        """The logits of the step.  A sequence whose numbers are not finite fails alone."""
        try:
            result = await self.executor.run(step)
            if result.not_finite:
                self._fail_outputs(plan, result)
            return result.logits
        except ComputeError as error:
            if len(plan.parts) == 1 or step.state_slots is not None:
                # States have moved on: what is repeated would be another step.
                for part in plan.parts:
                    self._fail(part.sequence, error)
                return np.empty((len(step.output_tokens), 0), np.float32)
        logger.warning("a step of %d sequences failed: computing each alone", len(plan.parts))
        rows: list[F32] = []
        for part, own in self.scheduler.alone(plan):
            try:
                rows += list((await self.executor.run(own)).logits.copy())
            except ComputeError as error:
                self._fail(part.sequence, error)
                rows += [np.empty(0, np.float32)] * len(own.output_tokens)
        n_vocab = self.executor.limits.n_vocab
        logits = np.full((len(rows), n_vocab), np.nan, np.float32)
        for row, values in enumerate(rows):
            if len(values):
                logits[row] = values
        return logits

    def _fail_outputs(self, plan: Plan, result: StepResult) -> None:
        """Fail the sequences of the outputs that are not finite."""
        wanting = [part.sequence for part in plan.parts if part.wants_logits]
        for row in result.not_finite:
            error = ComputeError(f"the logits of output {row} of the step are not finite")
            self._fail(wanting[row], error)

    async def _answer(self, ready: list[tuple[int, Sequence]], logits: F32) -> None:
        """Choose the next token of every sequence in `ready` and send it."""
        turn_began = time.perf_counter()
        for row, sequence in ready:
            answer = self._answers.get(sequence)
            if answer is None or sequence.cancel_wanted:
                continue
            if answer.n_remain == 0:
                answer.fill_only()
                self._end(sequence, State.FINISHED)
                continue
            n_passes = 1 if answer.sampler.is_quick else SLOW_PASSES
            work = partial(choose, answer, logits[row])
            is_small = n_passes * self.executor.limits.n_vocab <= INLINE_LOGITS
            outcome = work() if is_small else await self.off_loop(work)
            if isinstance(outcome, EngineError):
                self._fail(sequence, outcome)
            elif answer.take(outcome):
                self._end(sequence, State.FINISHED)
            if time.perf_counter() - turn_began > TURN_SECONDS:
                await asyncio.sleep(0)
                turn_began = time.perf_counter()

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        logger.warning("%r failed: %s", sequence, error)
        self.counters.requests_failed += 1
        if sequence in self._answers:
            self._answers[sequence].channel.put(error)
        self._end(sequence, State.FAILED)

    def _end(self, sequence: Sequence, state: State) -> None:
        self.scheduler.end(sequence, state, poisoned=state is State.FAILED)
        self._answers.pop(sequence, None)

    def _end_cancelled(self) -> None:
        for sequence in self._cancelled:
            if not sequence.is_over:
                self._end(sequence, State.CANCELLED)
        self._cancelled.clear()

    def _count(self, step: Step, seconds: float) -> None:
        counters, running = self.counters, self.scheduler.running
        counters.busy_slots += len(running)
        counters.max_tokens = max(counters.max_tokens, *[len(s.tokens) for s in running], 0)
        counters.preemptions = self.scheduler.n_preemptions
        counters.predicted_tokens += len(step.output_tokens)
        if step.kind is StepKind.PREFILL:
            counters.prompt_steps += 1
            counters.prompt_tokens += step.n_tokens
            counters.prompt_seconds += seconds
        else:
            counters.decode_steps += 1
            counters.predicted_seconds += seconds


def choose(answer: Answer, logits: F32) -> Choice | EngineError:
    """The answer's next token, or why there is none."""
    try:
        return answer.sampler.choose(logits, len(answer.sequence.tokens))
    except EngineError as error:
        return error
