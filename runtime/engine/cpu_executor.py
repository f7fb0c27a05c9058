"""CPUExecutor: performs steps on the worker team, one submitted program a step."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ops.cpu import KERNEL_CACHE
from ops.cpu.attention import tile_tokens
from ops.cpu.clock import ClockedProgram, CycleClock
from ops.cpu.compiling import Progress
from ops.cpu.isa import choose_isa
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.ledger import Ledger
from ops.cpu.program import Program
from ops.cpu.team import Team, TeamError, acquire_team
from runtime.engine.closing import CLOSING_SECONDS, close_within
from runtime.engine.embedding import EmbeddingRows
from runtime.engine.executor import ExecutorLimits
from runtime.engine.kernels import compile_kernels
from runtime.engine.kv_pages import KVPages
from runtime.engine.latent_jobs import head_groups
from runtime.engine.ngram_rows import NgramRows
from runtime.engine.program_builder import ProgramBuilder
from runtime.engine.program_times import ProgramTimes
from runtime.engine.state_slots import StateSlots, state_slots_for
from runtime.engine.step import Step, StepResult
from runtime.engine.step_buffers import StepBuffers
from runtime.errors import ComputeError, ConfigError, EngineBug, EngineClosed
from runtime.experts.recording import RoutingRecorder
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model import Model
from runtime.models.spec import AttentionSpec, ModelSpec
from runtime.profiling.record import StepTimes

LOOK_SECONDS, STUCK_SECONDS = 0.5, 0.01
"""Between looks at the workers while closing; for a closing that surely does not return now."""


class CPUExecutor:
    """An `Executor` on the CPU; made by `open_cpu_executor`.

    activation_bytes  what steps with an output for each sequence touch beside pages and states

    The model must stay open as long as the executor.
    """

    def __init__(
        self,
        model: Model,
        limits: ExecutorLimits,
        pages: KVPages,
        states: StateSlots,
        team: Team,
    ) -> None:
        self._model, self._limits, self._team = model, limits, team
        self._pages, self._states = pages, states
        self.timed = False
        self._cycles = CycleClock()
        self._clocked: ProgramTimes | None = None
        with Ledger() as ledger:
            self._buffers = StepBuffers(limits, smallest_tile(model.spec))
            self._embedding = EmbeddingRows(model.weights[model.spec.token_embedding])
            builder = self._build(Program)
        self.activation_bytes = ledger.n_bytes - builder.unused_bytes(limits.max_sequences)
        self.recorder: RoutingRecorder | None = None
        self._times: list[StepTimes] = []
        self.layers_computed = {"gpu": 0, "cpu": 0}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._running = False
        self._closed = False

    def _build(self, make: Callable[[int], Program]) -> ProgramBuilder:
        """Put the program of a step together, which steps from now on run."""
        model, limits = self._model, self._limits
        builder = ProgramBuilder(
            model,
            self._buffers,
            self._pages,
            self._states,
            self._team.n_threads,
            limits.max_step_tokens,
            make,
        )
        try:
            self._program = program = builder.build()
        except BaseException:
            builder.program.close()
            raise
        if isinstance(program, ClockedProgram):
            self._clocked = ProgramTimes(program, self._cycles)
        self._chunks, self._routing = builder.chunks, builder.routing
        self._x = builder.x.memory.view(np.float32)[:, : model.spec.n_embd]
        if self._embedding.table is not None:
            self._buffers.embed_from(self._embedding.table, builder.x)
        self._memories = [
            (NgramRows(memory, model.weights[memory.table]), rows.memory.view(np.float32))
            for memory, rows in builder.memories.filled
        ]
        return builder

    def _keep_times(self) -> None:
        """Have steps from now on keep times: by a program of their own, with no step in flight."""
        before = self._program
        self._build(ClockedProgram)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(before.event)
        self._loop = None
        before.close()

    def take_times(self) -> list[StepTimes]:
        """See `TimedExecutor`."""
        times, self._times = self._times, []
        return times

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    async def run(self, step: Step) -> StepResult:
        """See `Executor.run`.  Output tokens are each named once.

        Raises: ComputeError, EngineClosed; EngineBug for a step beyond the limits.
        """
        await self._until_idle()
        if self._closed:
            raise EngineClosed("the executor is closed")
        fresh = self.timed and self._clocked is None
        if fresh:
            self._keep_times()
        self._listen()
        if step.page_copies:
            self._pages.copy(step.page_copies)
        if step.state_copies:
            self._states.copy(step.state_copies)
        counts = self._buffers.fill(step)
        n_sequences = len(step.page_tables)
        self._chunks.apply(step.n_tokens, len(step.output_tokens), n_sequences, *counts)
        if self._embedding.table is None:
            await self._embedding.copy_to(self._x[: step.n_tokens], step.token_ids)
        for memory, rows in self._memories:
            await memory.copy_to(rows[: step.n_tokens], step)
        self._running = True
        launched = time.perf_counter()
        try:
            self._team.submit(self._program)
        except BaseException:
            self._running = False
            raise
        await self._until_idle()
        self.layers_computed["cpu"] += len(self._model.spec.layers)
        if self.timed and self._clocked is not None:
            self._times.append(self._clocked.read(launched, fresh=fresh))
        if self._program.take_error() != 0:
            raise EngineBug("a step names a position of a sequence that has no page")
        if self.recorder is not None:
            self.recorder.record(step, self._routing.choices(step, self._chunks.outputs))
        n_outputs = len(step.output_tokens)
        if self._buffers.not_finite[0]:
            wrong = np.flatnonzero(self._buffers.not_finite[1 : n_outputs + 1]).tolist()
            if step.state_slots is not None:
                return StepResult(self._buffers.logits[:n_outputs], tuple(wrong))
            raise ComputeError(f"the logits of outputs {wrong} of the step are not finite")
        return StepResult(self._buffers.logits[:n_outputs])

    def save_pages(self, pages: list[int]) -> bytes:
        self._check_idle()
        return self._pages.save(pages)

    def load_pages(self, pages: list[int], image: bytes) -> None:
        self._check_idle()
        self._pages.load(pages, image)

    def save_state(self, slot: int) -> bytes:
        self._check_idle()
        return self._states.save(slot)

    def load_state(self, slot: int, image: bytes) -> None:
        self._check_idle()
        self._states.load(slot, image)

    def describe(self) -> dict[str, object]:
        return {
            "device": "cpu",
            "threads": self._team.n_threads,
            "pinned_to": self._team.cpus,
            "isa": choose_isa(),
            "kernel_cache": KERNEL_CACHE.reason or str(KERNEL_CACHE.directory),
            "kv_bytes": self._pages.n_bytes,
            "kv_page_bytes": self._pages.page_bytes,
            "kv_pages": self._limits.n_pages,
            "activation_bytes": self.activation_bytes,
            "page_tokens": self._limits.page_tokens,
            "state_bytes": self._states.n_bytes,
            "state_slot_bytes": self._states.slot_bytes,
            "state_slots": self._limits.n_state_slots,
            "cache_type_k": self._pages.cache_types[0],
            "cache_type_v": self._pages.cache_types[1],
            "jobs_per_step": len(self._program.names),
            "layers_computed": dict(self.layers_computed),
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        stuck = not await self._ends()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._program.event)
        await close_within(self._give_back, STUCK_SECONDS if stuck else CLOSING_SECONDS)

    async def _ends(self) -> bool:
        """Wait for the step in flight as long as some worker still does something; whether it has
        ended."""
        pulse, since = self._team.pulse, time.monotonic()
        while self._running:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._until_idle()
            now = time.monotonic()
            if self._team.pulse != pulse:
                pulse, since = self._team.pulse, now
            elif now - since > CLOSING_SECONDS:
                break
        return not self._running

    def _give_back(self) -> None:
        """Workers that are stuck are waited for: they use the memory."""
        if self._running:
            self._program.wait()
        self._program.close()
        self._team.release()

    def _listen(self) -> None:
        """Watch the program's event on the running loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._program.event)
        loop.add_reader(self._program.event, self._ended)
        self._loop = loop

    def _ended(self) -> None:
        """The program's event is readable: wake whoever waits, the cancelled ones excepted."""
        os.eventfd_read(self._program.event)
        self._running = False
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _until_idle(self) -> None:
        while self._running:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def _check_idle(self) -> None:
        if self._running:
            raise EngineBug("pages were saved or loaded while a step runs")


def open_cpu_executor(
    model: Model,
    *,
    n_ctx: int,
    max_sequences: int,
    max_step_tokens: int,
    n_threads: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    n_snapshots: int | None = None,
    progress: Progress | None = None,
) -> CPUExecutor:
    """Compile the kernels, take the team and the memory.  Blocks: call it off the loop.

    n_ctx        KV cells, rounded up to whole pages
    n_snapshots  states kept beside those of running sequences, where the model has states; None:
                 what the memory suggests
    progress     called with (kernels ready, kernels in all)

    Raises: ConfigError for settings that do not fit the model or the machine.
    """
    spec = model.spec
    compile_kernels(model, progress)
    n_slots = state_slots_for(spec.state_bytes, max_sequences, n_snapshots)
    limits = cpu_limits(spec, n_ctx, max_sequences, max_step_tokens, n_slots)
    pages = KVPages(spec, limits.n_pages, cache_type_k, cache_type_v)
    try:
        team = acquire_team(n_threads)
    except TeamError as error:
        raise ConfigError(f"n_threads = {n_threads}: {error}") from error
    try:
        states = StateSlots(spec, limits.n_state_slots)
        return CPUExecutor(model, limits, pages, states, team)
    except BaseException:
        team.release()
        raise


def cpu_limits(
    spec: ModelSpec, n_ctx: int, max_sequences: int, max_step_tokens: int, n_state_slots: int
) -> ExecutorLimits:
    """Of an executor with so many KV cells, rounded up to whole pages."""
    return ExecutorLimits(
        n_vocab=spec.n_vocab,
        n_pages=-(-n_ctx // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        n_state_slots=n_state_slots,
        n_previous=spec.n_previous,
    )


def planned_activation_bytes(
    model: Model, limits: ExecutorLimits, n_workers: int, cache_types: tuple[str, str]
) -> int:
    """What an executor's `activation_bytes` would be: its program is put together on paper."""
    pages, states = KVPages(model.spec, 1, *cache_types), StateSlots(model.spec, 1)
    n_tokens, embedding = limits.max_step_tokens, model.weights[model.spec.token_embedding]
    with Ledger(dry=True) as ledger:
        held = StepBuffers(limits, smallest_tile(model.spec)), EmbeddingRows(embedding)
        builder = ProgramBuilder(model, held[0], pages, states, n_workers, n_tokens)
        try:
            builder.build()
        finally:
            builder.program.close()
    return ledger.n_bytes - builder.unused_bytes(limits.max_sequences)


def smallest_tile(spec: ModelSpec) -> int:
    """Prompt tokens of one attention work item, that every layer can take."""
    tiles = []
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttentionSpec):
            tiles.append(tile_tokens(mixer.n_head, head_groups(mixer.n_head)))
        elif isinstance(mixer, AttentionSpec):
            tiles.append(tile_tokens(mixer.n_head, mixer.n_head_kv))
    return min(tiles, default=1)
