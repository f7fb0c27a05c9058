"""GPUExecutor: performs steps on a GPU, one launched graph a step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ops.gpu.step_io import RING
from runtime.cuda.completion import reached
from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.captured_steps import CapturedStep
from runtime.engine.gpu.control import cell_pages
from runtime.engine.gpu.gpu_parts import Exchange, GPUParts, States
from runtime.engine.gpu.step_shape import MAX_OUTPUTS, Sampling, part_of, parts_of
from runtime.engine.step import I32, Step, StepResult
from runtime.errors import ComputeError, DeviceError, EngineBug, EngineClosed
from runtime.experts.recording import RoutingRecorder

STALLED_SECONDS = 2.0
"""Without an end this long after the expected one, a step counts as stalled."""

UNKNOWN_SECONDS = 30.0
"""How long the first step of a shape may take."""

MAX_IN_FLIGHT = 2
"""Steps: one runs, one waits, so that the GPU never does."""

SOON = 1e-6
"""Seconds, where a step ought to have ended already."""

NO_LOGITS = np.empty((MAX_OUTPUTS, 0), np.float32)

FEW = 32
"""Numbers that Python looks through more quickly than NumPy."""


@dataclass(eq=False, slots=True)
class Flight:
    """A step that was launched: its number, its graph, and since when it runs or would run."""

    epoch: int
    step: Step
    captured: CapturedStep
    began: float


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

    def __init__(self, limits: ExecutorLimits, parts: GPUParts) -> None:
        self._limits, self._parts = limits, parts
        self._epoch = 1  # of the next step
        self._flights: deque[Flight] = deque()  # launched, and not known to have ended
        self._last: Flight | None = None  # the one that was launched last
        self._closed = False
        self.recorder: RoutingRecorder | None = None  # where the CPU serves misses

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    async def run(self, step: Step) -> StepResult:
        """See `Executor.run`.

        Raises: ComputeError, EngineClosed, DeviceStalled, DeviceLost; EngineBug for a step beyond
        the limits.
        """
        await self._until_idle()
        cells = self._prepare(step)
        spans = parts_of(step, self._parts.shapes.most_tokens(step.kind))
        if len(spans) == 1:
            return await self._perform(step, cells)
        logits = np.empty((len(step.output_tokens), self._limits.n_vocab), np.float32)
        failed: list[int] = []
        for span in spans:
            part, rows = part_of(step, span)
            result = await self._perform(part, cells[span])
            logits[rows] = result.logits
            failed += [rows[i] for i in result.not_finite]
        return StepResult(logits, tuple(sorted(failed)))

    @property
    def runs_ahead(self) -> bool:
        # A token too many would stay in the state of its sequence; the next step's first GPU does
        # not see what the last one has chosen; nor does the host, which gathers rows by tokens.
        parts = self._parts
        needs = (parts.exchange, parts.states, parts.links, parts.memories)
        return all(need is None for need in needs)

    def samples(self, step: Step) -> bool:
        return self._parts.shapes.samples(step)

    async def begin(self, step: Step) -> GPUStepInFlight:
        """See `SamplingExecutor.begin`; `samples` is true of the step."""
        n_ahead = MAX_IN_FLIGHT - 1 if step.follows else 0
        while len(self._flights) > n_ahead:
            await self._until_ended(self._flights[0])
        return GPUStepInFlight(self, await self._launch(step, self._prepare(step)))

    async def result_of(self, flight: Flight) -> StepResult:
        """What the step gave, once it has ended.  Raises: as `run`."""
        await self._until_ended(flight)
        step, results = flight.step, self._parts.results
        if self.recorder is not None and self._parts.exchange is not None:
            self.recorder.record(step, self._choices(flight))
        n_outputs = len(step.output_tokens)
        if step.sampling is not None:
            alone = flight.captured.shape.sampling is Sampling.BEST
            chosen, wrong = results.chosen(flight.epoch, n_outputs, alone=alone)
            return StepResult(NO_LOGITS[:n_outputs], wrong, chosen)
        failed = results.not_finite(flight.epoch, n_outputs)
        if failed and step.state_slots is None:
            raise ComputeError(f"the logits of outputs {failed} of the step are not finite")
        return StepResult(results.logits[:n_outputs, : self._limits.n_vocab], tuple(failed))

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
            **({} if states is None else states.describe()),
            "kv_bytes": pages.n_bytes,
            "kv_page_bytes": pages.sizes.page_bytes,
            "kv_pages": pages.n_pages,
            "page_tokens": pages.page_tokens,
            "cache_type_k": pages.sizes.cache_types[0],
            "cache_type_v": pages.sizes.cache_types[1],
            "captured_graphs": len(self._parts.steps),
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            while self._flights:
                with suppress(ComputeError):  # nobody waits for what the step gave
                    await self._until_ended(self._flights[0])
        finally:
            self._parts.resources.close()

    def _prepare(self, step: Step) -> I32:
        """The page that holds each token of `step`, which may begin; its copies are on their way.

        Raises: EngineClosed, EngineBug.
        """
        if self._closed:
            raise EngineClosed("the executor is closed")
        cells = self._check(step)
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
        if self._last is not None and self._last.captured.shape is shape:
            captured = self._last.captured  # looking it up takes longer
        elif parts.steps.is_captured(shape):
            captured = parts.steps.of(shape)
        else:
            captured = await asyncio.to_thread(parts.steps.of, shape)  # the loop goes on meanwhile
        gathered = [] if parts.memories is None else await parts.memories.of(step)
        epoch = self._epoch
        if parts.links is not None and not self._flights:
            parts.links.resume()
        deltas = () if parts.exchange is None else parts.experts.before_step()
        writer = captured.writers[epoch % RING]
        writer.write(step, cells, deltas)
        writer.write_memories(gathered)
        flight = Flight(epoch, step, captured, time.perf_counter())
        if parts.exchange is None or shape.fetches:
            captured.graph.launch(parts.stream)
        else:
            self._launch_with_cpu(flight, parts.exchange)
        self._flights.append(flight)
        self._last = flight
        self._epoch = (epoch + 1) & 0xFFFFFFFF
        if parts.exchange is not None:
            parts.experts.while_running()
        return flight

    def _launch_with_cpu(self, flight: Flight, exchange: Exchange) -> None:
        exchange.begin(flight.epoch)
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
            usual = first.captured.seconds
            rest = max(usual - (time.perf_counter() - first.began), SOON) if usual else 0.0
            try:
                await reached(
                    self._ended(first.epoch),
                    expected=rest,
                    check=self._check_device,
                    limit=STALLED_SECONDS + (10 * usual or UNKNOWN_SECONDS),
                )
            except (DeviceError, EngineBug):
                if self._parts.links is not None:
                    self._parts.links.stop()
                raise
            if self._flights and self._flights[0] is first:
                self._retire()

    def _retire(self) -> None:
        """The first step in flight has ended."""
        now = time.perf_counter()
        flight = self._flights.popleft()
        flight.captured.took(now - flight.began)
        if self._flights:
            self._flights[0].began = now
        if self._parts.exchange is not None:
            choices, fetched = self._choices(flight), flight.captured.shape.fetches
            self._parts.experts.after_step(choices, fetched=fetched)
            self._parts.exchange.check(flight.epoch)
        if self._parts.links is not None:
            self._parts.links.check(flight.epoch)

    def _choices(self, flight: Flight) -> I32:
        """The experts that the step used, i32[n_moe_layers, n_tokens, n_used]."""
        return flight.captured.choices(self._parts.results.choices)[:, : flight.step.n_tokens]

    def _ended(self, epoch: int) -> Callable[[], bool]:
        done, exchange = self._parts.results.done, self._parts.exchange
        links = self._parts.links
        if links is not None:
            return lambda: (
                links.ended(epoch)
                and has_reached(int(done[0]), epoch)
                and (exchange is None or exchange.idle)
            )
        if exchange is None:
            return lambda: has_reached(int(done[0]), epoch)
        return lambda: int(done[0]) == epoch and exchange.idle

    def _check_device(self) -> None:
        """Raises: DeviceLost; EngineBug where the GPU is idle and a step has no end."""
        if self._last is None or not self._parts.stream.idle():
            return
        if not has_reached(int(self._parts.results.done[0]), self._last.epoch):
            raise EngineBug("a step ended on the GPU without a report")

    def _check(self, step: Step) -> I32:
        """The page that holds each token, i32[n_tokens]; raises EngineBug beyond the limits."""
        limits = self._limits
        n_tokens, n_sequences = step.n_tokens, len(step.page_tables)
        n_positions = step.page_tables.shape[1] * limits.page_tokens
        if (
            not 0 < n_tokens <= limits.max_step_tokens
            or n_sequences > limits.max_sequences
            or not self._are_tokens(step)
            or not below(step.rows, n_sequences)
            or not below(step.positions, n_positions)
            or not below(step.output_tokens, n_tokens)
        ):
            raise EngineBug(
                f"a step of {n_tokens} tokens and {n_sequences} sequences, up to position "
                f"{step.positions.max(initial=-1)}, is beyond the executor's {limits} or names a "
                "token that does not exist"
            )
        cells = cell_pages(step, limits.page_tokens)
        if not below(cells, limits.n_pages):
            raise EngineBug("a step names a position of a sequence that has no page")
        if not self._names_states(step):
            raise EngineBug(f"state slots {step.state_slots}, copies {step.state_copies}")
        return cells

    def _are_tokens(self, step: Step) -> bool:
        """Whether the step's tokens exist, or will when the step before has chosen them."""
        if not step.follows:
            return below(step.token_ids, self._limits.n_vocab)
        last = self._last
        return (
            last is not None
            and last.step.sampling is not None
            and below(-1 - step.token_ids, len(last.step.output_tokens))
        )

    def _names_states(self, step: Step) -> bool:
        """Whether the step has the slots of its sequences' states, if there are states."""
        if self._parts.states is None or step.state_slots is None:
            return self._parts.states is None and step.state_slots is None
        n_slots = self._parts.states.n_slots
        copied = np.array(step.state_copies, np.int32).reshape(-1)
        return below(step.state_slots, n_slots) and below(copied, n_slots)

    def _held_states(self) -> States:
        if self._parts.states is None:
            raise EngineBug("the model has no states")
        return self._parts.states

    def _check_idle(self) -> None:
        if self._flights:
            raise EngineBug("pages were saved or loaded while a step runs")


def has_reached(done: int, epoch: int) -> bool:
    """Whether the step `epoch` is at or before the step `done`; both wrap at 2^32."""
    return (done - epoch) & 0xFFFFFFFF < 1 << 31


def below(values: I32, limit: int) -> bool:
    """Whether all of them are in 0 .. limit - 1."""
    if len(values) > FEW:
        return int(values.view(np.uint32).max()) < limit
    few = values.tolist()  # quicker than NumPy's reductions
    return not few or (min(few) >= 0 and max(few) < limit)
