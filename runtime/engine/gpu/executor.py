"""GPUExecutor: performs steps on a GPU, one launched graph a step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace

import numpy as np

from ops.gpu.step_io import RING
from runtime.engine.closing import CLOSING_SECONDS, close_within
from runtime.engine.executor import ExecutorLimits, StepInFlight
from runtime.engine.gpu.flight import Flight, Uses
from runtime.engine.gpu.gpu_parts import Exchange, GPUParts, States
from runtime.engine.gpu.gpu_plan import GPUPlan
from runtime.engine.gpu.graph_memory import graph_of, smaller_steps
from runtime.engine.gpu.joined_parts import in_parts
from runtime.engine.gpu.step_check import StepCheck
from runtime.engine.gpu.step_ends import StepEnds
from runtime.engine.gpu.step_shape import MAX_OUTPUTS, Sampling, part_of, parts_of
from runtime.engine.gpu.step_watch import StepWatch
from runtime.engine.gpu.warm_up import WarmUp
from runtime.engine.step import I32, Step, StepResult
from runtime.errors import (
    ComputeError,
    DeviceError,
    DeviceStalled,
    EngineBug,
    EngineClosed,
    OutOfGraphMemory,
)
from runtime.experts.recording import RoutingRecorder
from runtime.experts.totals import ExpertTotals
from runtime.profiling.record import StepTimes

MAX_IN_FLIGHT = 2
"""Steps: one runs, one waits, so that the GPU never does."""
NO_LOGITS = np.empty((MAX_OUTPUTS, 0), np.float32)


class GPUStepInFlight:
    """See `StepInFlight`."""

    def __init__(self, executor: GPUExecutor, flight: Flight) -> None:
        self._executor, self._flight = executor, flight

    async def result(self) -> StepResult:
        return await self._executor.result_of(self._flight)


class GPUExecutor:
    """A `SamplingExecutor` on one GPU; made by `open_gpu_executor`.

    The model must stay open as long as the executor.
    """

    runs_ahead = True

    def __init__(self, limits: ExecutorLimits, parts: GPUParts) -> None:
        self._limits, self._parts = limits, parts
        self._check = StepCheck(limits, None if parts.states is None else parts.states.n_slots)
        self._epoch = 1  # of the next step
        self._flights: deque[Flight] = deque()  # launched, and not known to have ended
        self._last: Flight | None = None  # the one that was launched last
        self._in_parts = False  # the step that began last: none can follow it
        self._closed = False
        self._given_up = False  # a step did not end as it should
        self._undecided = False  # of the last launch on, which experts set out for the GPU
        self.recorder: RoutingRecorder | None = None  # where the CPU serves misses
        self.timed = False
        self._times: list[StepTimes] = []
        self.layers_computed = {"gpu": 0, "cpu": 0}
        self._ends = StepEnds(parts)
        self._watch = None if parts.exchange is None else StepWatch(parts)
        self.warm_up = WarmUp(parts)

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @property
    def planned(self) -> GPUPlan:
        """What it holds, and why."""
        return self._parts.planned

    async def run(self, step: Step) -> StepResult:
        """See `Executor.run`.

        Raises: ComputeError, EngineClosed, DeviceStalled, DeviceLost; EngineBug for a step beyond
        the limits.
        """
        if step.sampling is not None and step.n_tokens > self._parts.shapes.most_tokens(step.kind):
            return await (await self.begin(step)).result()
        await self._until_idle()
        cells = self._prepare(step)
        fetches = self._parts.experts.may_fetch
        spans = deque(parts_of(step, self._parts.shapes.most_tokens(step.kind, fetches=fetches)))
        if len(spans) == 1:
            try:
                return await self._perform(step, cells)
            except OutOfGraphMemory:
                spans.extend(smaller_steps(self._parts, step, spans.popleft()))
                if not spans:
                    raise
        logits = np.empty((len(step.output_tokens), self._limits.n_vocab), np.float32)
        failed: list[int] = []
        uses: Uses = ()
        for span in spans:
            part, rows = part_of(step, span)
            result = await self._perform(part, cells[span])
            logits[rows] = result.logits
            failed += [rows[i] for i in result.not_finite]
            uses += result.uses
        return StepResult(logits, tuple(sorted(failed)), uses=uses)

    def expert_totals(self) -> ExpertTotals | None:
        """See `CountingExecutor`."""
        totals, exchange = self._parts.experts.totals(), self._parts.exchange
        if totals is None or exchange is None:
            return totals
        busy, waiting = exchange.team_seconds()
        return replace(totals, cpu_seconds=busy, wait_seconds=waiting)

    def take_times(self) -> list[StepTimes]:
        """See `TimedExecutor`."""
        times, self._times = self._times, []
        return times

    def samples(self, step: Step) -> bool:
        return not (step.follows and self._in_parts) and self._parts.shapes.samples(step)

    async def begin(self, step: Step) -> StepInFlight:
        """See `SamplingExecutor.begin`; `samples` is true of the step."""
        await self._until_room(step)
        cells = self._prepare(step)
        spans = parts_of(step, self._parts.shapes.most_tokens(step.kind))
        self._in_parts = len(spans) > 1
        if self._in_parts:
            return await in_parts(self, step, cells, spans)
        return await self.begin_part(step, cells)

    async def begin_part(self, part: Step, cells: I32) -> StepInFlight:
        """Begin a part of a step: one that `follows` behind the part before it."""
        await self._until_room(part)
        return GPUStepInFlight(self, await self._launch(part, cells))

    async def _until_room(self, step: Step) -> None:
        while len(self._flights) >= (MAX_IN_FLIGHT if step.follows else 1):
            await self._until_ended(self._flights[0])

    async def result_of(self, flight: Flight) -> StepResult:
        """What the step gave, once it has ended.  Raises: as `run`."""
        await self._until_ended(flight)
        if flight.lost is not None:
            raise flight.lost
        step, results = flight.step, self._parts.results
        if self.recorder is not None and self._parts.exchange is not None:
            self.recorder.record(step, self._choices(flight))
        n_outputs = len(step.output_tokens)
        if step.sampling is not None:
            alone = flight.captured.shape.sampling is Sampling.BEST
            chosen, wrong = results.chosen(flight.epoch, n_outputs, alone=alone)
            return StepResult(NO_LOGITS[:n_outputs], wrong, chosen, flight.uses)
        failed = results.not_finite(flight.epoch, n_outputs)
        if failed and step.state_slots is None:
            raise ComputeError(f"the logits of outputs {failed} of the step are not finite")
        logits = results.logits[:n_outputs, : self._limits.n_vocab]
        return StepResult(logits, tuple(failed), uses=flight.uses)

    async def resize(self, vram_limit: int | None) -> int:
        """See `ResizableExecutor.resize`."""
        await self._until_idle()
        return await asyncio.to_thread(self._parts.memory.resize, vram_limit)

    def save_pages(self, pages: list[int]) -> bytes:
        self._check_idle()
        return self._parts.pages.save(pages, self._parts.stream)

    def load_pages(self, pages: list[int], image: bytes) -> None:
        self._check_idle()
        self._parts.pages.load(pages, image, self._parts.stream)

    def save_state(self, slot: int) -> bytes:
        self._check_idle()
        return self._held_states().save(slot, self._parts.stream)

    def load_state(self, slot: int, image: bytes) -> None:
        self._check_idle()
        self._held_states().load(slot, image, self._parts.stream)

    def describe(self) -> dict[str, object]:
        pages, states = self._parts.pages, self._parts.states
        return {
            **self._parts.facts,
            **self._parts.experts.describe(),
            **({} if self._parts.misses is None else self._parts.misses.describe()),
            **({} if states is None else states.describe()),
            "kv_bytes": pages.n_bytes,
            "kv_page_bytes": pages.sizes.page_bytes,
            "kv_pages": pages.n_pages,
            "page_tokens": pages.page_tokens,
            "cache_type_k": pages.sizes.cache_types[0],
            "cache_type_v": pages.sizes.cache_types[1],
            "captured_graphs": len(self._parts.steps),
            "layers_computed": dict(self.layers_computed),
        }

    async def close(self) -> None:
        """See `Executor.close`.

        Raises: DeviceStalled where the GPU does not end its work, CloseStalled where it or a worker
        keeps the memory; CudaError.
        """
        if self._closed:
            return
        self._closed = True
        usual = max((flight.captured.seconds for flight in self._flights), default=0.0)
        limit = 0.0 if self._given_up else CLOSING_SECONDS + 10 * usual
        try:
            async with asyncio.timeout(limit):
                while self._flights:
                    await self._until_ended(self._flights[0])
        except TimeoutError:
            if not self._given_up:  # else whoever waited knows
                raise DeviceStalled(limit) from None
        finally:
            await close_within(self._parts.resources.close, CLOSING_SECONDS)

    def _prepare(self, step: Step) -> I32:
        """The page that holds each token of `step`, which may begin; its copies are on their way.

        Raises: EngineClosed, EngineBug.
        """
        if self._closed:
            raise EngineClosed("the executor is closed")
        last = None if self._last is None else self._last.step
        cells = self._check.cells(step, last)
        if step.page_copies:
            self._parts.pages.copy(step.page_copies, self._parts.stream)
        if step.state_copies:
            self._held_states().copy(step.state_copies, self._parts.stream)
        return cells

    async def _perform(self, step: Step, cells: I32) -> StepResult:
        """The result of a step that fits a shape."""
        flight = await self._launch(step, cells)
        await asyncio.sleep(0)
        return await self.result_of(flight)

    async def _launch(self, step: Step, cells: I32) -> Flight:
        """Start a step that fits a shape, and the CPU's part of it."""
        parts = self._parts
        shape = parts.shapes.of(step)
        if self.timed:
            shape = parts.shapes.timed(shape)
        fresh = False
        if self._last is not None and self._last.captured.shape is shape:
            captured = self._last.captured  # looking it up takes longer
        elif parts.steps.is_captured(shape):
            captured = parts.steps.of(shape)
        else:
            fresh = True
            last = None if self._last is None else self._last.captured.shape
            captured = await graph_of(parts, shape, last, self._until_idle)
        gathered = [] if parts.memories is None else await parts.memories.of(step)
        epoch = self._epoch
        if parts.links is not None and not self._flights:
            parts.links.resume()
        if self._watch is not None and not self._flights:
            await self._watch.idle()
        deltas = () if parts.exchange is None else parts.experts.before_step()
        writer = captured.writers[epoch % RING]
        writer.write(step, cells, deltas)
        if parts.memories is not None:
            parts.memories.give(gathered, epoch, writer)
        flight = Flight(epoch, step, captured, time.perf_counter(), fresh)
        if parts.exchange is None or shape.fetches:
            captured.graph.launch(parts.stream)
        else:
            self._launch_with_cpu(flight, parts.exchange)
        self._flights.append(flight)
        self._last = flight
        self._epoch = (epoch + 1) & 0xFFFFFFFF
        if self._undecided:  # nobody had time since the last launch
            parts.experts.while_running()
        self._undecided = parts.exchange is not None
        return flight

    def _launch_with_cpu(self, flight: Flight, exchange: Exchange) -> None:
        exchange.begin(flight.epoch, behind=flight.step.follows)
        try:
            flight.captured.graph.launch(self._parts.stream)
        except BaseException:
            exchange.abort()
            self._parts.experts.after_step(self._choices(flight)[:, :0])
            raise

    async def _until_idle(self) -> None:
        """Wait for all steps in flight, whoever launched them.

        Raises: DeviceStalled, DeviceLost; the step then stays in flight.
        """
        while self._flights:
            await self._until_ended(self._flights[0])

    async def _until_ended(self, flight: Flight) -> None:
        """Wait for a step and those before it.  Raises: as `_until_idle`."""
        while flight in self._flights:
            first = self._flights[0]
            if self._undecided and not self._ends.of(first.epoch)():
                self._undecided = False
                self._parts.experts.while_running()
            try:
                await self._ends.until(first, self._last or first)
            except (DeviceError, EngineBug):
                self._given_up = True
                if self._parts.links is not None:
                    self._parts.links.stop()
                raise
            if self._flights and self._flights[0] is first:
                self._retire()

    def _retire(self) -> None:
        """The first step in flight has ended."""
        now, flight = time.perf_counter(), self._flights.popleft()
        self.layers_computed["gpu"] += self._parts.n_layers
        flight.captured.took(now - flight.began)
        if flight.captured.times:
            moved = self._parts.experts.take_spans()
            self._times += flight.times(now, self._parts.exchange, moved)
        if self._flights:
            self._flights[0].began = now
        if self._parts.exchange is not None:
            choices, fetched = self._choices(flight), flight.captured.shape.fetches
            use = self._parts.experts.after_step(choices, fetched=fetched)
            flight.uses = ((flight.step.n_tokens, use),)
            if self._watch is not None:
                self._watch.ended(flight.step, use, now - flight.began)
        flight.check(self._parts.exchange, self._parts.memories, self._parts.links)

    def _choices(self, flight: Flight) -> I32:
        """The experts that the step used, i32[n_moe_layers, n_tokens, n_used]."""
        results = self._parts.results.choices[flight.epoch % RING]
        return flight.captured.choices(results)[:, : flight.step.n_tokens]

    def _held_states(self) -> States:
        if self._parts.states is None:
            raise EngineBug("the model has no states")
        return self._parts.states

    def _check_idle(self) -> None:
        if self._flights:
            raise EngineBug("pages were saved or loaded while a step runs")
