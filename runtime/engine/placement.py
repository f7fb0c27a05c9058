"""Placement: which executor computes a model, and why; opening both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from runtime.config import ContextShape, EngineConfig, context_shape
from runtime.engine.executor import Executor, ExecutorLimits
from runtime.engine.memory_plan import MemoryPlan, cpu_memory_plan, gpu_memory_plan
from runtime.engine.model_facts import ModelFacts, facts_of, open_template, open_tokenizer
from runtime.engine.planning import machine_here
from runtime.engine.proposals import CPU_BATCH, gpu_proposals
from runtime.errors import DeviceError
from runtime.notices import Notices, Reason
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.models.model import Model


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A ready executor, its model, why it was chosen, and what to close after it.

    check_model   raises CorruptModel where the model's file was truncated since it was opened
    notices       what is not as one would expect, told while it opened and from then on
    plan          what all of it takes; None: of the fake device
    """

    executor: Executor
    model: ModelFacts
    shape: ContextShape
    reason: str
    resources: ExitStack
    check_model: Callable[[], None] = lambda: None
    notices: Notices = field(default_factory=Notices)
    plan: MemoryPlan | None = None

    async def close(self) -> None:
        """Close the executor, then the model under it."""
        try:
            await self.executor.close()
        finally:
            self.resources.close()


@dataclass(frozen=True)
class Ready:
    """An executor, the context that it has room for, and what all of it takes."""

    executor: Executor
    shape: ContextShape
    plan: MemoryPlan | None = None


Open = Callable[["Model", EngineConfig, int, Progress, Notices], Ready]
"""model, config, tokens of the context that the model was trained on, progress, notices."""


def _open_cpu(
    model: Model,
    config: EngineConfig,
    n_ctx_train: int,
    progress: Progress,
    notices: Notices,
) -> Ready:
    # The first import on a machine compiles for seconds.
    progress.start("preparing kernels")
    from ops.cpu import KERNEL_CACHE
    from ops.cpu.kv_layout import PAGE_TOKENS
    from runtime.engine.cpu_executor import open_cpu_executor

    if KERNEL_CACHE.reason:
        notices.add(Reason.NOT_KEPT, f"the CPU's compiled kernels: {KERNEL_CACHE.reason}")

    def kernel_ready(n_ready: int, n_kernels: int) -> None:
        if n_ready == 0:
            logger.info("preparing %d kernels; compiled once for this CPU, then kept", n_kernels)
            progress.start("preparing kernels", n_kernels, "kernel")
        else:
            progress.advance()

    shape = context_shape(config, n_ctx_train)
    executor = open_cpu_executor(
        model,
        n_ctx=shape.n_pages(PAGE_TOKENS) * PAGE_TOKENS,
        max_sequences=shape.n_parallel,
        max_step_tokens=max(config.n_batch or CPU_BATCH, shape.n_parallel),
        n_threads=config.n_threads,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        n_snapshots=None if config.n_snapshots is None else config.n_snapshots * shape.n_parallel,
        progress=kernel_ready,
    )
    if config.given_for_gpus:
        ignored = ", ".join(config.given_for_gpus)
        verb = "changes" if len(config.given_for_gpus) == 1 else "change"
        notices.add(Reason.NO_EFFECT, f"the CPU computes this model: {ignored} {verb} nothing")
    causes = [notice.text for notice in notices.all if notice.reason is Reason.CPU]
    reason = "; ".join(causes) or ("asked for" if config.device == "cpu" else "no GPU can")
    machine, taken = machine_here(with_gpus=False), executor.activation_bytes
    plan = cpu_memory_plan(model, config, shape, machine, reason, taken)
    return Ready(executor, shape, plan)


def _open_cuda(
    model: Model,
    config: EngineConfig,
    n_ctx_train: int,
    progress: Progress,
    notices: Notices,
) -> Ready:
    from runtime.cuda.driver import open_driver

    driver = None
    try:
        driver = open_driver()  # before anything is imported for a GPU that is not there
        from runtime.engine.gpu.opening import open_gpu_executor

        proposals = gpu_proposals(config, n_ctx_train, notices)
        settings = [proposal.settings for proposal in proposals]
        executor = open_gpu_executor(model, settings, progress, driver=driver)
    except DeviceError as error:
        if config.device == "auto":
            notices.add(Reason.CPU, str(error), usual=driver is None)
        raise
    planned = executor.planned
    shape = proposals[settings.index(planned.settings)].shape
    machine = machine_here(with_gpus=False)
    return Ready(executor, shape, gpu_memory_plan(model, config, shape, planned, machine))


# In the order of preference: `auto` takes the first that can be used, the last one always can.
DEVICES: Mapping[str, Open] = {
    "cuda": _open_cuda,
    "cpu": _open_cpu,
}


def open_placed(config: EngineConfig, progress: Progress) -> Opened:
    """Open the model of `config` and the executor for it.  Takes seconds: call it from a thread.

    Raises: ConfigError, ModelError, DeviceError.
    """
    if config.device == "fake":
        return _open_fake(config, progress)
    with (
        ExitStack() as resources,
        ThreadPoolExecutor(3, thread_name_prefix="opening") as beside,
        ExitStack() as woken,
    ):
        if config.device in ("auto", "cuda"):
            woken.callback(beside.submit(_wake_gpu, config.main_gpu, woken).result)
        model = _open_model(config, progress, resources)
        naming = beside.submit(_name_bus_errors, model, config, resources)
        reading = beside.submit(_read_file, model)
        notices, n_ctx_train = Notices(), model.spec.n_ctx_train
        checked = _CheckedProgress(progress, reading)
        try:
            ready, reason = _open_executor(model, config, n_ctx_train, checked, notices)
        except DeviceError:
            reading.result()  # what is wrong with the file counts for more
            raise
        try:
            naming.result()
            facts = reading.result()
        except BaseException:
            asyncio.run(ready.executor.close())
            raise
        return Opened(
            ready.executor,
            facts,
            ready.shape,
            reason,
            resources.pop_all(),
            model.file.check_unchanged,
            notices,
            ready.plan,
        )


def _read_file(model: Model) -> ModelFacts:
    """What callers may know of the model.  Raises: ModelError for what opening it does not read."""
    from runtime.models.vectors import check_numbers

    check_numbers(model)
    return facts_of(model)


class _CheckedProgress(Progress):
    """Shows what it is told as another one does, until what is read beside turns out to be wrong:
    then the work ends with that error, instead of minutes later."""

    def __init__(self, shown: Progress, reading: Future[ModelFacts]) -> None:
        super().__init__()
        self._shown, self._reading = shown, reading

    def start(self, phase: str, total: int = 0, unit: str = "") -> None:
        """See `Progress.start`.  Raises: ModelError, CancelledError."""
        self._check_read()
        self._shown.start(phase, total, unit)

    def advance(self, n: int = 1) -> None:
        """See `Progress.advance`.  Raises: ModelError, CancelledError."""
        self._check_read()
        self._shown.advance(n)

    def _check_read(self) -> None:
        if self._reading.done():
            self._reading.result()


def _open_executor(
    model: Model,
    config: EngineConfig,
    n_ctx_train: int,
    progress: Progress,
    notices: Notices,
) -> tuple[Ready, str]:
    """The executor on the device that was named, or on the first that can be used; and why."""
    given = model, config, n_ctx_train, progress, notices
    if config.device != "auto":
        return DEVICES[config.device](*given), "asked for"
    reasons: list[str] = []
    *preferred, last = DEVICES
    for name in preferred:
        try:
            ready = DEVICES[name](*given)
        except DeviceError as error:
            reasons.append(str(error))
            continue
        return ready, f"{name} can compute the model"
    return DEVICES[last](*given), f"{last}, because of {preferred[0]}: {'; '.join(reasons)}"


def _wake_gpu(index: int, woken: ExitStack) -> None:
    """Have the driver find its GPUs and make one's context, most of which needs no Python, before
    they are asked for.  `woken` lets go of it, when others hold it.

    What is wrong there is said by whoever opens it.
    """
    from runtime.cuda.device import Device
    from runtime.cuda.driver import open_driver

    with suppress(DeviceError):
        woken.enter_context(Device(open_driver(), index))


def _name_bus_errors(model: Model, config: EngineConfig, resources: ExitStack) -> None:
    """Have errors of the file's medium name it, if that is wanted: its handler is compiled."""
    if config.name_bus_errors:
        from ops.cpu.sigbus import named_bus_errors

        resources.enter_context(named_bus_errors(model.file.map_ranges()))


def _open_model(config: EngineConfig, progress: Progress, resources: ExitStack) -> Model:
    from runtime.models.model import open_model

    progress.start("opening the model")
    model = resources.enter_context(open_model(config.model_path))
    if config.load_mode == "pin":
        from runtime.engine.read_ahead import read_ahead

        resources.enter_context(read_ahead(model))
    return model


def _open_fake(config: EngineConfig, progress: Progress) -> Opened:
    """The fake device; with a model, its vocabulary and sizes are that model's."""
    from runtime.engine.fake_executor import FakeExecutor
    from runtime.engine.fake_model import N_SNAPSHOTS, PAGE_TOKENS, fake_bias, fake_facts

    with ExitStack() as resources:
        has_states, n_previous = False, 0
        if config.model is None:
            facts = fake_facts()
            tokenizer, text_error = open_tokenizer(facts.metadata)
            template, template_error = open_template(facts.metadata, tokenizer)
            facts = replace(
                facts,
                text=tokenizer,
                text_error=text_error,
                template=template,
                template_error=template_error,
            )
        else:
            model = _open_model(config, progress, resources)
            _name_bus_errors(model, config, resources)
            progress.start("reading the vocabulary")
            facts = facts_of(model)
            has_states, n_previous = model.spec.state_bytes > 0, model.spec.n_previous
        shape = context_shape(config, facts.n_ctx_train)
        limits = ExecutorLimits(
            n_vocab=facts.n_vocab,
            n_pages=shape.n_pages(PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            max_step_tokens=max(config.n_batch or CPU_BATCH, shape.n_parallel),
            max_sequences=shape.n_parallel,
            n_state_slots=shape.n_parallel + N_SNAPSHOTS if has_states else 0,
            n_previous=n_previous,
        )
        executor = FakeExecutor(limits, bias=fake_bias(facts.n_vocab))
        return Opened(executor, facts, shape, "asked for", resources.pop_all())
