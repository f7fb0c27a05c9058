"""Opening the GPU executor: which GPUs, what fits where, then memory, weights, kernels, graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, open_driver
from runtime.cuda.module import CubinCache
from runtime.engine.gpu.captured_steps import CapturedSteps
from runtime.engine.gpu.control import ControlRing
from runtime.engine.gpu.devices import open_devices
from runtime.engine.gpu.exchange_opening import (
    measured_misses,
    open_exchange,
    open_rows,
    prepare_cpu,
    show_experts,
    start_tests,
    take_team,
)
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.expert_memory import ExpertMemories, ExpertMemory
from runtime.engine.gpu.expert_opening import hold_experts, moe_blocks
from runtime.engine.gpu.gathered_rows import GatheredRows
from runtime.engine.gpu.gpu_parts import GPUParts
from runtime.engine.gpu.gpu_plan import GPUPlan, plan_gpus
from runtime.engine.gpu.graph_memory import first_graph
from runtime.engine.gpu.links import Links
from runtime.engine.gpu.plan_parts import Mailboxes
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share import parts_of
from runtime.engine.gpu.share_opening import ShareOpening
from runtime.engine.gpu.shared_parts import SharedParts, shared_parts, whole_shapes
from runtime.engine.gpu.split import (
    SplitExperts,
    SplitPages,
    SplitStates,
    SplitSteps,
    SplitStream,
)
from runtime.engine.gpu.step_shape import StepShapes
from runtime.engine.gpu.support import obstacles
from runtime.engine.machine import GPUFacts
from runtime.errors import DeviceUnavailable
from runtime.experts.usage import LifetimeUsage, lifetime_usage
from runtime.models.model import Model
from runtime.notices import Reason
from runtime.progress import Progress, follow

if TYPE_CHECKING:
    from ops.cpu.compiling import Preparation
    from ops.cpu.team import Team
    from runtime.engine.gpu.table_rows import TableRows
    from runtime.experts.exchange import Exchange

logger = logging.getLogger(__name__)


def open_gpu_executor(
    model: Model,
    settings: GPUSettings | Sequence[GPUSettings],
    progress: Progress,
    *,
    driver: Driver | None = None,
    cache: CubinCache | None = None,
) -> GPUExecutor:
    """Take the GPUs, load the weights and the kernels.  Blocks: call it off the loop.

    settings: of several the first that fit the GPUs' memory count
    Raises: DeviceUnavailable with the reason where the model cannot be computed here; ConfigError,
    OutOfDeviceMemory, CudaError, PtxCompileError.
    """
    reasons = obstacles(model)
    if reasons:
        raise DeviceUnavailable(f"the GPU's kernels lack: {', '.join(reasons)}")
    with ExitStack() as resources:
        progress.start("opening the GPU")
        proposed = [settings] if isinstance(settings, GPUSettings) else list(settings)
        opened = open_devices(
            driver or open_driver(), proposed[0], len(parts_of(model.spec)), resources
        )
        gpus = [GPUFacts(device.info, device.free_bytes()) for device in opened]
        refused = partial(proposed[0].notices.add, Reason.PROFILE_REFUSED)
        usage = lifetime_usage(model, tell=refused) if model.spec.n_expert_max else None
        if usage is not None:
            usage.tell = partial(proposed[0].notices.add, Reason.NOT_KEPT)
        known = None if usage is None else usage.for_plan
        plan = plan_gpus(model, proposed, gpus, known)
        devices = _used(opened, plan)
        opening = _Opening(model, plan, usage, progress, devices, resources)
        return opening.executor(cache if cache is not None else CubinCache())


def _used(devices: Sequence[Device], plan: GPUPlan) -> list[Device]:
    """The devices of the plan; the others are closed."""
    used = {share.gpu.info.index for share in plan.shares}
    for device in devices:
        if device.info.index not in used:
            device.close()
    return [device for device in devices if device.info.index in used]


class _Opening:
    """The steps of opening, and what they share.

    missing   the GPUs that do not hold all of their experts
    exchange  what serves these; None: there are none
    """

    def __init__(
        self,
        model: Model,
        plan: GPUPlan,
        usage: LifetimeUsage | None,
        progress: Progress,
        devices: Sequence[Device],
        resources: ExitStack,
    ) -> None:
        self.model, self.planned, self.progress = model, plan, progress
        self.usage = usage
        self.settings, self.limits = plan.settings, plan.limits
        self.devices, self.resources = devices, resources
        self.shares = [
            ShareOpening(share, experts, device, resources)
            for share, experts, device in zip(plan.shares, plan.experts, devices, strict=True)
        ]
        self.links: Links | None = None
        self.rows: TableRows | None = None
        self.missing: list[ShareOpening] = []
        self.exchange: Exchange | None = None

    def executor(self, cache: CubinCache) -> GPUExecutor:
        """Open all of it.  Raises: as `open_gpu_executor`."""
        with self._staying():
            return self._executor(cache)

    def _staying(self) -> AbstractContextManager[None]:
        """This thread calls one GPU alone, if there is only one."""
        return self.devices[0].staying() if len(self.devices) == 1 else nullcontext()

    def _in_context(self, work: Callable[..., None], *arguments: object) -> None:
        with self._staying():
            work(*arguments)

    def _executor(self, cache: CubinCache) -> GPUExecutor:
        own, shares = self.resources.callback, self.shares
        common = self._fill(cache)
        missing, exchange = self.missing, self.exchange
        ring = ControlRing(self.devices[0], max(share.needs.block_bytes for share in shares))
        own(ring.close)
        tables = [share.n_rows for share in shares]
        done = [*([] if self.links is None else self.links.done), None]
        steps = [
            share.capture(ring, common.results, tables, at, first)
            for share, at, first in zip(shares, done, common.first_choices, strict=True)
        ]
        parts = GPUParts(
            stream=shares[0].stream,
            pages=shares[0].pages,
            states=shares[0].states,
            experts=shares[0].experts,
            exchange=exchange,
            shapes=common.shapes,
            steps=steps[0],
            results=common.results,
            resources=ExitStack(),
            facts=self._facts(),
            memory=ExpertMemories(
                [
                    ExpertMemory(
                        share.device, share.planned, share.expert_plan, share.experts, share.memory
                    )
                    for share in missing
                ],
                self.settings.notices,
            ),
            planned=replace(self.planned, experts=tuple(share.expert_plan for share in shares)),
            n_layers=len(self.model.spec.layers),
            memories=None if self.rows is None else GatheredRows(self.model, self.rows),
            misses=None
            if exchange is None
            else measured_misses(exchange, missing[0], self.settings, self.progress),
        )
        if self.links is not None:
            self._split(parts, steps, self.links)
        self.progress.start("capturing graphs")
        for shape in common.shapes.first_request():
            first_graph(parts, shape)
        parts.resources = self.resources.pop_all()
        return GPUExecutor(self.limits, parts)

    def _fill(self, cache: CubinCache) -> SharedParts:
        """Take memory, fill it, and have all kernels ready, as much as possible at once."""
        shares = self.shares
        with ThreadPoolExecutor(1, thread_name_prefix="kernels") as helper:
            # Importing the compiler is a second of Python, in which memory can be taken.
            whole, tables = self.planned.whole, self.model.spec.memory_tables
            prepare = partial(prepare_cpu, self.model, shares, self.resources, whole=whole)
            preparing = helper.submit(prepare) if tables or not whole else None
            self._hold()
            common = shared_parts(
                self.model.spec, self.limits, shares, self.missing, self.resources
            )
            beside = Progress()
            getting_ready = helper.submit(
                self._in_context, self._kernels, common, cache, preparing, beside
            )
            try:
                moved = self._moving("experts", sum(share.experts.n_bytes for share in shares))
                for share in shares:
                    share.load_experts(moved)
                follow(getting_ready, beside, self.progress)
            except BaseException:
                beside.cancel()
                raise
            getting_ready.result()
        if self.exchange is not None:
            show_experts(self.exchange, self.missing)
        return common

    def _hold(self) -> None:
        """Take each GPU's memory, and fill it but for experts.

        Other weights travel first: until the CPU's compiler is imported nothing can decide on
        experts, whose pages are pinned meanwhile.
        """
        for share in self.shares:
            share.open_dense()
        self._link()
        moved = self._moving("weights", sum(share.weights.n_bytes for share in self.shares))
        for share in self.shares:
            share.load_dense(moved)
        self.missing = hold_experts(
            self.model, self.planned, self.shares, self.usage, self.progress, self.resources
        )

    def _split(
        self,
        parts: GPUParts,
        steps: Sequence[CapturedSteps],
        links: Links,
    ) -> None:
        """Of several GPUs: what belongs to each, behind the interfaces of what belongs to one."""
        shares = self.shares
        parts.stream = SplitStream([share.stream for share in shares])
        parts.pages = SplitPages([share.pages for share in shares])
        if self.limits.n_state_slots:
            parts.states = SplitStates([share.states for share in shares])
        layers = [len(moe_blocks([share])) if share in self.missing else 0 for share in shares]
        rows = [share.first_row for share in shares]
        parts.experts = SplitExperts([share.experts for share in shares], rows, layers)
        parts.steps = SplitSteps(steps, links)
        parts.links = links

    def _link(self) -> None:
        """Join the GPUs, if there are several."""
        if len(self.shares) == 1:
            return
        n_tokens = whole_shapes(self.model.spec, self.limits).max_batch
        stride = n_tokens * self.shares[0].share.row_bytes
        self.links = Links(self.devices, stride)
        self.resources.callback(self.links.close)
        for index, share in enumerate(self.shares):
            share.join(self.links, index)
        first_row = 0
        for share in self.shares:
            share.first_row = first_row
            first_row += share.n_rows

    def _moving(self, what: str, n_bytes: int) -> Callable[[int], None]:
        """Begin to show how many of these bytes have moved; returns what is told of each piece."""
        self.progress.start(f"moving {what} to the GPU", n_bytes >> 20, "MiB")
        rest = 0

        def moved(n_bytes: int) -> None:
            nonlocal rest
            n_whole, rest = divmod(rest + n_bytes, 1 << 20)
            self.progress.advance(n_whole)

        return moved

    def _kernels(
        self,
        common: SharedParts,
        cache: CubinCache,
        preparing: Future[Preparation] | None,
        progress: Progress,
    ) -> None:
        """Have the kernels of both sides ready, and what joins them; on a thread of its own, while
        weights travel.

        preparing: the CPU's kernels, which the exchange calls
        """
        if preparing is not None:
            preparation = preparing.result()
            progress.start("preparing CPU kernels", preparation.n_kernels, "kernel")
            preparation.wait(lambda n_ready, _: progress.advance(min(n_ready, 1)))
        missing, shapes = self.missing, common.shapes
        exchange = None
        if missing:
            n_tokens, team = shapes.most_missed_tokens, self._team()
            done = common.results.done_host
            exchange = open_exchange(team, self.model, missing, n_tokens, done, self.resources)
        gpus, results = self.devices, common.results
        self.rows = open_rows(self.model, exchange, shapes, results, gpus, self.resources)
        for share in self.shares:
            share.open_kernels(cache)
        with ThreadPoolExecutor(1, thread_name_prefix="exchange test") as tester:
            tests: list[Future[None]] = []
            if exchange is not None and self.settings.exchange_rounds:
                tests = start_tests(tester, exchange, missing, self.settings.exchange_rounds)
            self._plan(shapes, exchange)
            n_kernels = sum(len(share.needs.kernels) for share in self.shares)
            progress.start("assembling GPU kernels", n_kernels, "kernel")
            advance: Callable[[], object] = progress.advance
            for share in self.shares:
                share.assemble(advance)
            self._tell_not_kept(cache)
            if tests:
                progress.start("testing the exchange with the CPU")
            for test in tests:
                test.result()
        self.exchange = exchange

    def _tell_not_kept(self, cache: CubinCache) -> None:
        """Say so where the next start has to make the kernels anew."""
        if cache.reason:
            text = f"the GPU's assembled kernels: {cache.reason}"
            self.settings.notices.add(Reason.NOT_KEPT, text)
        if not self.planned.whole or self.model.spec.memory_tables:
            from ops.cpu import KERNEL_CACHE

            if KERNEL_CACHE.reason:
                text = f"the CPU's compiled kernels: {KERNEL_CACHE.reason}"
                self.settings.notices.add(Reason.NOT_KEPT, text)

    def _team(self) -> Team:
        """The CPU's workers.  Raises: ConfigError."""
        # Whoever launches and looks for ends must not wait for a worker's processor.
        return take_team(self.settings.n_threads, len(self.devices), self.resources)

    def _plan(self, shapes: StepShapes, exchange: Exchange | None) -> None:
        max_deltas = sum(share.experts.max_deltas for share in self.shares)
        largest, first = shapes.largest(), 0
        for share in self.shares:
            mailboxes: Mailboxes | None = None
            if exchange is not None and share in self.missing:
                mailboxes = exchange if first == 0 else exchange.on(share.device, first)
                first += len(moe_blocks([share]))
            rows = None if self.rows is None else self.rows.on(share.device)
            share.plan(mailboxes, rows, max_deltas, largest)

    def _facts(self) -> dict[str, object]:
        """Of all GPUs together, then of each where there are several."""
        each = [share.facts() for share in self.shares]
        facts: dict[str, object] = {"device": "cuda", **each[0]}
        facts["driver"] = self.devices[0].driver.version
        if self.links is None:
            return facts
        facts["gpu"] = ", ".join(str(share["gpu"]) for share in each)
        facts["weights_bytes"] = sum(share.weights.n_bytes for share in self.shares)
        facts["activation_bytes"] = sum(share.room.nbytes for share in self.shares)
        facts["direct_hand_over"] = all(link.direct for link in self.links.between)
        facts["gpus"] = each
        return facts
