"""GPUExecutor: performs steps on a GPU, one launched graph a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ops.gpu.step_io import RING
from runtime.cuda.completion import reached
from runtime.cuda.device import Device
from runtime.cuda.stream import Stream
from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.captured_steps import CapturedStep, CapturedSteps
from runtime.engine.gpu.control import cell_pages
from runtime.engine.gpu.experts import ExpertStore
from runtime.engine.gpu.kv import GPUPages
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.step_shape import StepShapes, part_of, parts_of
from runtime.engine.step import F32, I32, Step, StepResult
from runtime.errors import ComputeError, EngineBug, EngineClosed
from runtime.experts.recording import RoutingRecorder

STALLED_SECONDS = 2.0
"""Without an end this long after the expected one, a step counts as stalled."""

UNKNOWN_SECONDS = 30.0
"""How long the first step of a shape may take."""

FEW = 32
"""Numbers that Python looks through more quickly than NumPy."""


@dataclass
class GPUParts:
    """What an executor is made of; `resources` closes all of it.

    exchange  has the CPU compute missed experts; None: there are none
    """

    device: Device
    stream: Stream
    pages: GPUPages
    experts: ExpertStore
    exchange: Exchange | None
    shapes: StepShapes
    steps: CapturedSteps
    results: Results
    resources: ExitStack
    facts: dict[str, object]


class Exchange(Protocol):
    """See `runtime.experts.exchange.Exchange`."""

    @property
    def idle(self) -> bool: ...

    def begin(self, epoch: int) -> None: ...

    def check(self, epoch: int) -> None: ...

    def abort(self) -> None: ...


class GPUExecutor:
    """An `Executor` on one GPU; made by `open_gpu_executor`.

    The model must stay open as long as the executor.
    """

    def __init__(self, limits: ExecutorLimits, parts: GPUParts) -> None:
        self._limits, self._parts = limits, parts
        self._epoch = 1  # of the next step
        self._running: CapturedStep | None = None
        self._began = 0.0
        self._closed = False
        self._n_tokens = 0  # of the step in flight
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
        if self._closed:
            raise EngineClosed("the executor is closed")
        cells = self._check(step)
        parts = self._parts
        if step.page_copies:
            parts.pages.copy(step.page_copies, parts.stream)
        spans = parts_of(step, parts.shapes.most_tokens(step.kind))
        if len(spans) == 1:
            return StepResult(await self._perform(step, cells))
        logits = np.empty((len(step.output_tokens), self._limits.n_vocab), np.float32)
        for span in spans:
            part, rows = part_of(step, span)
            logits[rows] = await self._perform(part, cells[span])
        return StepResult(logits)

    def save_pages(self, pages: list[int]) -> bytes:
        self._check_idle()
        return self._parts.pages.save(pages, self._parts.stream)

    def load_pages(self, pages: list[int], image: bytes) -> None:
        self._check_idle()
        self._parts.pages.load(pages, image, self._parts.stream)

    def describe(self) -> dict[str, object]:
        pages = self._parts.pages
        return {
            **self._parts.facts,
            **self._parts.experts.describe(),
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
            await self._until_idle()
        finally:
            self._parts.resources.close()

    async def _perform(self, step: Step, cells: I32) -> F32:
        """The logits of a step that fits a shape, f32[n_outputs, n_vocab] in pinned memory."""
        parts, epoch = self._parts, self._epoch
        shape = parts.shapes.of(step)
        if not parts.steps.is_captured(shape):
            await asyncio.to_thread(parts.steps.of, shape)  # the loop goes on meanwhile
        captured = parts.steps.of(shape)
        deltas = () if parts.exchange is None else parts.experts.before_step()
        captured.writers[epoch % RING].write(step, cells, deltas)
        self._n_tokens = step.n_tokens
        self._began = time.perf_counter()
        self._launch(captured)
        await asyncio.sleep(0)
        await self._until_idle()
        if self.recorder is not None and parts.exchange is not None:
            self.recorder.record(step, self._choices(captured))
        wrong = parts.results.not_finite(epoch, len(step.output_tokens))
        if wrong:
            raise ComputeError(f"the logits of outputs {wrong} of the step are not finite")
        return parts.results.logits[: len(step.output_tokens), : self._limits.n_vocab]

    def _launch(self, captured: CapturedStep) -> None:
        """Start the step, and the CPU's part of it."""
        exchange, experts = self._parts.exchange, self._parts.experts
        if exchange is None:
            captured.graph.launch(self._parts.stream)
            self._running = captured
            return
        exchange.begin(self._epoch)
        try:
            captured.graph.launch(self._parts.stream)
        except BaseException:
            exchange.abort()
            self._n_tokens = 0
            experts.after_step(self._choices(captured))
            raise
        self._running = captured
        experts.while_running()

    async def _until_idle(self) -> None:
        """Wait for the step in flight, whoever launched it.

        Raises: DeviceStalled, DeviceLost; the step then stays in flight.
        """
        while self._running is not None:
            captured, epoch = self._running, self._epoch
            limit = STALLED_SECONDS + (10 * captured.seconds or UNKNOWN_SECONDS)
            await reached(
                self._ended(epoch), expected=captured.seconds, check=self._check_device, limit=limit
            )
            if self._running is captured and self._epoch == epoch:
                captured.took(time.perf_counter() - self._began)
                self._epoch = (epoch + 1) & 0xFFFFFFFF
                self._running = None
                if self._parts.exchange is not None:
                    self._parts.experts.after_step(self._choices(captured))
                    self._parts.exchange.check(epoch)

    def _choices(self, captured: CapturedStep) -> I32:
        """The experts that the step used, i32[n_moe_layers, n_tokens, n_used]."""
        n_layers, n_tokens, n_used = captured.choices_shape
        choices = self._parts.results.choices[: n_layers * n_tokens * n_used]
        return choices.reshape(captured.choices_shape)[:, : self._n_tokens]

    def _ended(self, epoch: int) -> Callable[[], bool]:
        done, exchange = self._parts.results.done, self._parts.exchange
        if exchange is None:
            return lambda: int(done[0]) == epoch
        return lambda: int(done[0]) == epoch and exchange.idle

    def _check_device(self) -> None:
        """Raises: DeviceLost; EngineBug where the GPU is idle and the step has no end."""
        if self._parts.stream.idle() and int(self._parts.results.done[0]) != self._epoch:
            raise EngineBug("a step ended on the GPU without a report")

    def _check(self, step: Step) -> I32:
        """The page that holds each token, i32[n_tokens]; raises EngineBug beyond the limits."""
        limits = self._limits
        n_tokens, n_sequences = step.n_tokens, len(step.page_tables)
        n_positions = step.page_tables.shape[1] * limits.page_tokens
        if (
            not 0 < n_tokens <= limits.max_step_tokens
            or n_sequences > limits.max_sequences
            or not below(step.token_ids, limits.n_vocab)
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
        return cells

    def _check_idle(self) -> None:
        if self._running is not None:
            raise EngineBug("pages were saved or loaded while a step runs")


def below(values: I32, limit: int) -> bool:
    """Whether all of them are in 0 .. limit - 1."""
    if len(values) > FEW:
        return int(values.view(np.uint32).max()) < limit
    few = values.tolist()  # quicker than NumPy's reductions
    return not few or (min(few) >= 0 and max(few) < limit)
