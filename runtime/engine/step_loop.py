"""StepLoop: carries out what the scheduler decides, one step after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from runtime.engine.answer import Answer
from runtime.engine.between_steps import BetweenSteps
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.choosing import choose, choose_chosen
from runtime.engine.executor import Executor, SamplingExecutor, StepInFlight
from runtime.engine.idle import Idler
from runtime.engine.plan import Plan
from runtime.engine.sampler import Choice
from runtime.engine.scheduler import Scheduler
from runtime.engine.sequence import Sequence, State
from runtime.engine.statistics import Counters
from runtime.engine.step import F32, Chosen, DeviceWork, Step, StepKind, StepResult
from runtime.errors import ComputeError, EngineError
from runtime.notices import Notices, Reason
from runtime.profiling.profiler import Profiler
from runtime.profiling.record import StepSort

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Choosing a token from more logits than this takes over a millisecond: it happens off the loop.
# Logits that one pass reduces to a few count once, others as the passes that they take.
INLINE_LOGITS = 200_000
SLOW_PASSES = 8
SORTS = (StepSort.PROMPT, StepSort.DECODE)
# Answering many sequences gives the loop a turn this often.
TURN_SECONDS = 1e-3


class StepLoop:
    """The only caller of the executor; all bookkeeping happens on the event loop."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, helper: ThreadPoolExecutor, notices: Notices
    ) -> None:
        """helper: one thread for whatever would hold up the event loop."""
        self.scheduler, self.executor, self._notices = scheduler, executor, notices
        self.counters = Counters()
        self.slots: dict[int, Answer] = {}  # the last answer of each slot
        self.profiler: Profiler | None = None
        # Where the executor chooses tokens itself.
        self._sampling = executor if isinstance(executor, SamplingExecutor) else None
        self._helper = helper
        self._answers: dict[Sequence, Answer] = {}
        self._cancelled: list[Sequence] = []
        self._wake = asyncio.Event()
        self.between_steps = BetweenSteps(self._wake.set)
        self._idler = Idler(executor)

    def submit(self, answer: Answer) -> None:
        """Queue an answer; its items come through its channel."""
        self._answers[answer.sequence] = answer
        self.scheduler.add(answer.sequence)
        self._wake.set()

    def cancel(self, answer: Answer) -> None:
        """Free the sequence's pages as soon as the steps in flight, if any, have ended."""
        sequence = answer.sequence
        if sequence in self._answers and not sequence.cancel_wanted:
            sequence.cancel_wanted = True
            self._cancelled.append(sequence)
            self._wake.set()

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the helper thread."""
        return await asyncio.get_running_loop().run_in_executor(self._helper, work)

    def fail_all(self, error: EngineError) -> None:
        """The engine ends: every caller that still waits gets `error`."""
        for answer in self._answers.values():
            answer.channel.put(error)
        self._answers.clear()
        self._cancelled.clear()
        self.between_steps.fail_all(error)

    async def run_forever(self) -> None:
        """Step while there is work, sleep while there is none."""
        while True:
            await self.between_steps.run_all()
            self._end_cancelled()
            plan = self.scheduler.next_step()
            if plan.step is not None:
                # Callers read the tokens of one step while the next one is computed.
                await self._perform(plan, plan.step)
            elif not self.between_steps:
                self._wake.clear()
                await self._idler.until(self._wake)
                if self.profiler is not None:
                    self.profiler.woke()

    async def _perform(self, plan: Plan, step: Step) -> None:
        for part in plan.parts:
            answer = self.slots[part.sequence.slot] = self._answers[part.sequence]
            if not answer.has_begun:
                answer.begin()
                self.counters.prompt_tokens_cached += part.sequence.n_cached
        if plan.saves or plan.loads:
            await self.off_loop(lambda: self._move_pages(plan))
        if self._sampling is not None:
            sampled = self._with_sampling(self._sampling, plan, step)
            if sampled is not None:
                await self._run_ahead(self._sampling, plan, sampled)
                return
        self._begins(step)
        began = time.perf_counter()
        logits = await self._compute(plan, step)
        seconds = time.perf_counter() - began
        self._ended(len(step.output_tokens))
        ready = self.scheduler.commit(plan, seconds)
        self._count(step, len(step.output_tokens), seconds)
        if step.kind is StepKind.PREFILL:
            for part in plan.parts:
                if part.sequence in self._answers:
                    self._answers[part.sequence].report_progress()
        await self._answer(ready, logits)

    def _with_sampling(self, executor: SamplingExecutor, plan: Plan, step: Step) -> Step | None:
        """`step` with the work of each output's sampler; None where the executor cannot do it."""
        if step.kind is not StepKind.DECODE:
            return None
        works: list[DeviceWork] = []
        for part in plan.parts:
            sampler = self._answers[part.sequence].sampler
            if not isinstance(sampler, CandidateSampler):
                return None
            work = sampler.device_work(part.start + 1)
            if work is None:
                return None
            works.append(work)
        sampled = replace(step, sampling=tuple(works))
        return sampled if executor.samples(sampled) else None

    async def _run_ahead(self, executor: SamplingExecutor, plan: Plan, step: Step) -> None:
        """Perform `step`, whose tokens the executor chooses, and those that can follow it.

        Each begins before the one before it has ended: the executor never waits for the host.
        """
        began = time.perf_counter()
        flight = await self._begin(executor, plan, step)
        while flight is not None:
            following = self._following(executor, plan)
            behind = None if following is None else await self._begin(executor, *following)
            await asyncio.sleep(0)  # callers read the tokens of the step before
            result = await self._result(plan, flight)
            now = time.perf_counter()
            self._ended(len(step.output_tokens))
            ready = self.scheduler.commit(plan, now - began)
            self._count(step, len(ready), now - began)
            if result is not None and result.chosen is not None and step.sampling is not None:
                await self._answer_chosen(ready, step.sampling, result.chosen)
            if following is None or behind is None:
                return
            (plan, step), flight, began = following, behind, now

    async def _begin(
        self, executor: SamplingExecutor, plan: Plan, step: Step
    ) -> StepInFlight | None:
        """Begin the step of `plan`; None where that failed, and with it its sequences, if it is not
        one that follows: what it stands for is planned anew."""
        self._begins(step)
        try:
            flight = await executor.begin(step)
            if step.follows:
                self.scheduler.began_behind(plan)
            return flight
        except ComputeError as error:
            if self.profiler is not None:
                self.profiler.did_not_begin()
            if step.follows:
                return None
            for part in plan.parts:
                self._fail(part.sequence, error)
            self.scheduler.commit(plan, 0.0)
            return None

    async def _result(self, plan: Plan, flight: StepInFlight) -> StepResult | None:
        """What the step of `plan` gave; None where it gave nothing, and its sequences failed."""
        try:
            result = await flight.result()
        except ComputeError as error:
            for part in plan.parts:
                self._fail_or_spoil(part.sequence, error)
            return None
        self._note_uses(plan, result)
        if result.not_finite:
            self._fail_outputs(plan, result)
        return result

    def _following(self, executor: SamplingExecutor, plan: Plan) -> tuple[Plan, Step] | None:
        """What comes behind the step of `plan`, which is in flight; None: nothing for now.

        A new request, a cancelled one, work between steps, or a sampler that looks at the tokens
        before: then the host decides what comes next, when the step has ended.
        """
        if not executor.runs_ahead or self.between_steps or self._cancelled:
            return None
        ahead = self.scheduler.following(plan, self._ends_next, self._work_ahead)
        if ahead is None or ahead.step is None or not executor.samples(ahead.step):
            return None
        return ahead, ahead.step

    def _ends_next(self, sequence: Sequence) -> bool:
        return self._answers[sequence].ends_next

    def _work_ahead(self, sequence: Sequence, position: int) -> DeviceWork | None:
        """What chooses the token of `position`, if that can be said before the one before it."""
        sampler = self._answers[sequence].sampler
        if isinstance(sampler, CandidateSampler) and sampler.runs_ahead:
            return sampler.device_work(position)
        return None

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
            self._note_uses(plan, result)
            if result.not_finite:
                self._fail_outputs(plan, result)
            return result.logits
        except ComputeError as error:
            if len(plan.parts) == 1 or step.state_slots is not None:
                # States have moved on: what is repeated would be another step.
                for part in plan.parts:
                    self._fail(part.sequence, error)
                return np.empty((len(step.output_tokens), 0), np.float32)
            self._notices.add(Reason.STEP_SPLIT, f"a step of several sequences failed: {error}")
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

    def _note_uses(self, plan: Plan, result: StepResult) -> None:
        """Tell the answers what served the experts of their tokens."""
        for sequence, use, tokens, n_tokens in plan.uses(result):
            if sequence in self._answers:
                self._answers[sequence].use.add(use, tokens, n_tokens)

    def _fail_outputs(self, plan: Plan, result: StepResult) -> None:
        """Fail the sequences of the outputs that are not finite."""
        wanting = [part.sequence for part in plan.parts if part.wants_logits]
        for row in result.not_finite:
            error = ComputeError(f"the logits of output {row} of the step are not finite")
            self._fail_or_spoil(wanting[row], error)

    async def _answer(self, ready: list[tuple[int, Sequence]], logits: F32) -> None:
        """Choose the next token of every sequence in `ready` and send it."""
        began = turn_began = time.perf_counter()
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
            self._take(sequence, answer, outcome)
            if time.perf_counter() - turn_began > TURN_SECONDS:
                await asyncio.sleep(0)
                turn_began = time.perf_counter()
        self._answered(began)

    async def _answer_chosen(
        self, ready: list[tuple[int, Sequence]], works: tuple[DeviceWork, ...], chosen: Chosen
    ) -> None:
        """Send the token that was chosen for every sequence in `ready`."""
        began = turn_began = time.perf_counter()
        for row, sequence in ready:
            answer = self._answers.get(sequence)
            if answer is None or sequence.cancel_wanted:
                continue
            self._take(sequence, answer, choose_chosen(answer, works[row], chosen, row))
            if time.perf_counter() - turn_began > TURN_SECONDS:
                await asyncio.sleep(0)
                turn_began = time.perf_counter()
        self._answered(began)

    def _take(self, sequence: Sequence, answer: Answer, outcome: Choice | EngineError) -> None:
        """The sequence goes on with a token, or ends."""
        if isinstance(outcome, EngineError):
            self._fail(sequence, outcome)
        elif answer.take(outcome):
            self._end(sequence, State.FINISHED)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        logger.warning("%r failed: %s", sequence, error)
        self.counters.requests_failed += 1
        if sequence in self._answers:
            self._answers[sequence].channel.put(error)
        self._end(sequence, State.FAILED)

    def _fail_or_spoil(self, sequence: Sequence, error: EngineError) -> None:
        """Its part of a step failed; it may have ended with the step before."""
        if sequence in self._answers:
            self._fail(sequence, error)
        else:
            self.scheduler.spoil(sequence)

    def _end(self, sequence: Sequence, state: State) -> None:
        self.scheduler.end(sequence, state, poisoned=state is State.FAILED)
        self._answers.pop(sequence, None)

    def _end_cancelled(self) -> None:
        for sequence in self._cancelled:
            if not sequence.is_over:
                self._end(sequence, State.CANCELLED)
        self._cancelled.clear()

    def _begins(self, step: Step) -> None:
        if self.profiler is not None:
            self.profiler.begins(SORTS[step.kind is StepKind.DECODE], step.n_tokens)

    def _ended(self, n_outputs: int) -> None:
        if self.profiler is not None:
            self.profiler.ended(n_outputs)

    def _answered(self, began: float) -> None:
        if self.profiler is not None:
            self.profiler.answered(began)

    def _count(self, step: Step, n_outputs: int, seconds: float) -> None:
        counters, running = self.counters, self.scheduler.running
        counters.busy_slots += len(running)
        counters.max_tokens = max(counters.max_tokens, *[len(s.tokens) for s in running], 0)
        counters.preemptions = self.scheduler.n_preemptions
        counters.predicted_tokens += n_outputs
        if step.kind is StepKind.PREFILL:
            counters.prompt_steps += 1
            counters.prompt_tokens += step.n_tokens
            counters.prompt_seconds += seconds
        else:
            counters.decode_steps += 1
            counters.predicted_seconds += seconds
