"""CPUExecutor: performs steps on the worker team, one submitted program a step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import numpy as np

from ops.cpu import KERNEL_CACHE
from ops.cpu.attention import attention, attention_end, tile_tokens
from ops.cpu.experts import down, gate_up
from ops.cpu.heads import heads
from ops.cpu.isa import choose_isa
from ops.cpu.job import JobKernel
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.linear import products
from ops.cpu.matmul import matmul_address
from ops.cpu.norm import norm, quantize
from ops.cpu.router import group, route
from ops.cpu.step_inputs import fill_function
from ops.cpu.team import Team, TeamError, acquire_team
from runtime.engine.embedding import EmbeddingRows
from runtime.engine.executor import ExecutorLimits
from runtime.engine.kv_pages import KVPages
from runtime.engine.program_builder import ProgramBuilder
from runtime.engine.step import Step, StepResult
from runtime.engine.step_buffers import StepBuffers
from runtime.errors import ComputeError, ConfigError, EngineBug, EngineClosed
from runtime.models.model import Model

JOB_KERNELS: tuple[JobKernel, ...] = (
    norm, quantize, products, heads, attention, attention_end, route, group, gate_up, down,
)  # fmt: skip
Progress = Callable[[int, int], None]


class CPUExecutor:
    """An `Executor` on the CPU; made by `open_cpu_executor`.

    The model must stay open as long as the executor.
    """

    def __init__(self, model: Model, limits: ExecutorLimits, pages: KVPages, team: Team) -> None:
        self._model, self._limits, self._pages, self._team = model, limits, pages, team
        tiles = [tile_tokens(la.mixer.n_head, la.mixer.n_head_kv) for la in model.spec.layers]
        self._buffers = StepBuffers(limits, min(tiles))
        builder = ProgramBuilder(
            model, self._buffers, pages, team.n_threads, limits.max_step_tokens
        )
        try:
            self._program = builder.build()
        except BaseException:
            builder.program.close()
            raise
        self._chunks = builder.chunks
        self._x = builder.x.memory.view(np.float32)
        self._embedding = EmbeddingRows(model.weights[model.spec.token_embedding])
        if self._embedding.table is not None:
            self._buffers.embed_from(self._embedding.table, builder.x)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._running = False
        self._closed = False

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
        self._listen()
        if step.page_copies:
            self._pages.copy(step.page_copies)
        self._chunks.apply(step.n_tokens, len(step.output_tokens), *self._buffers.fill(step))
        if self._embedding.table is None:
            await self._embedding.copy_to(self._x[: step.n_tokens], step.token_ids)
        self._running = True
        try:
            self._team.submit(self._program)
        except BaseException:
            self._running = False
            raise
        await self._until_idle()
        if self._program.take_error() != 0:
            raise EngineBug("a step names a position of a sequence that has no page")
        n_outputs = len(step.output_tokens)
        if self._buffers.not_finite[0]:
            wrong = np.flatnonzero(self._buffers.not_finite[1 : n_outputs + 1]).tolist()
            raise ComputeError(f"the logits of outputs {wrong} of the step are not finite")
        return StepResult(self._buffers.logits[:n_outputs])

    def save_pages(self, pages: list[int]) -> bytes:
        self._check_idle()
        return self._pages.save(pages)

    def load_pages(self, pages: list[int], image: bytes) -> None:
        self._check_idle()
        self._pages.load(pages, image)

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
            "page_tokens": self._limits.page_tokens,
            "cache_type_k": self._pages.cache_types[0],
            "cache_type_v": self._pages.cache_types[1],
            "jobs_per_step": len(self._program.names),
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._until_idle()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._program.event)
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
    progress: Progress | None = None,
) -> CPUExecutor:
    """Compile the kernels, take the team and the memory.  Blocks: call it off the loop.

    n_ctx      KV cells, rounded up to whole pages
    progress   called with (kernels ready, kernels in all)

    Raises: ConfigError for settings that do not fit the model or the machine.
    """
    spec = model.spec
    compile_kernels(model, progress)
    n_pages = -(-n_ctx // PAGE_TOKENS)
    limits = ExecutorLimits(
        n_vocab=spec.n_vocab,
        n_pages=n_pages,
        page_tokens=PAGE_TOKENS,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    pages = KVPages(spec, n_pages, cache_type_k, cache_type_v)
    try:
        team = acquire_team(n_threads)
    except TeamError as error:
        raise ConfigError(f"n_threads = {n_threads}: {error}") from error
    try:
        return CPUExecutor(model, limits, pages, team)
    except BaseException:
        team.release()
        raise


def compile_kernels(model: Model, progress: Progress | None = None) -> None:
    """Compile, or load from the cache, every kernel that `model` needs."""
    steps: list[Callable[[], object]] = [kernel.compile for kernel in JOB_KERNELS]
    steps += [partial(matmul_address, name) for name in sorted(_product_formats(model))]
    steps.append(fill_function)
    for n_ready, step in enumerate(steps):
        if progress is not None:
            progress(n_ready, len(steps))
        step()
    if progress is not None:
        progress(len(steps), len(steps))


def _product_formats(model: Model) -> set[str]:
    """Names of the formats of all matrices that are multiplied."""
    return {model.weights[linear.weight].format.name for linear in model.spec.linears}
