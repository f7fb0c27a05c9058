"""Opening the GPU executor: what fits where, then memory, weights, kernels and the first graphs."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ops.gpu.kv_layout import PAGE_TOKENS
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, open_driver
from runtime.cuda.memory import DeviceBuffer, slot_bytes
from runtime.cuda.module import CubinCache
from runtime.cuda.stream import Stream
from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.captured_steps import CapturedSteps, Needs, needs_of
from runtime.engine.gpu.control import ControlRing
from runtime.engine.gpu.executor import GPUExecutor, GPUParts
from runtime.engine.gpu.experts import (
    ExpertStore,
    ResidentExperts,
    choices_shape,
    expert_bytes,
    moe_layers,
)
from runtime.engine.gpu.functions import Functions
from runtime.engine.gpu.kv import CacheSizes, GPUPages
from runtime.engine.gpu.plan_parts import StepMemory
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.step_graph import StepPlanner, logits_stride
from runtime.engine.gpu.step_shape import LARGEST_BATCH, StepShapes
from runtime.engine.gpu.support import obstacles
from runtime.engine.gpu.transfer import Transfer, flat, transfer_all
from runtime.engine.gpu.weights import DeviceWeights
from runtime.engine.step import StepKind
from runtime.errors import ConfigError, DeviceUnavailable
from runtime.models.model import Model
from runtime.models.spec import MoeSpec
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.experts.exchange import Exchange
    from runtime.experts.host_experts import HostExperts

logger = logging.getLogger(__name__)

MARGIN_BYTES = 256 << 20
"""VRAM left for graphs, modules and the driver's own needs."""

LARGEST_SHARED_BATCH = 512
"""Tokens of a step whose missed experts the CPU computes: so many share the read of a weight, and
what they exchange stays in the tens of megabytes."""

FIRST_EPOCH = 1

CHOICES_PADDING = 4
"""Numbers behind the choices: they are copied 16 bytes at a time."""


@dataclass(frozen=True)
class GPUSettings:
    """What an executor is opened with; see `EngineConfig`.

    n_ctx       KV cells, rounded up to whole pages
    vram_limit  bytes to use at most; None: all that is free
    n_threads   CPU workers that compute experts the GPU does not hold
    exchange_rounds  answers in the start-up test of handing experts over to them; 0: no test
    """

    n_ctx: int
    max_sequences: int
    max_step_tokens: int
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    vram_limit: int | None = None
    moe_expert_cache: int = -1
    n_threads: int | None = None
    exchange_rounds: int = 10_000


def open_gpu_executor(
    model: Model,
    settings: GPUSettings,
    progress: Progress,
    *,
    driver: Driver | None = None,
    cache: CubinCache | None = None,
) -> GPUExecutor:
    """Take the GPU, load the weights and the kernels.  Blocks: call it off the loop.

    Raises: DeviceUnavailable with the reason where the model cannot be computed here; ConfigError,
    OutOfDeviceMemory, CudaError, PtxCompileError.
    """
    reasons = obstacles(model)
    if reasons:
        raise DeviceUnavailable(f"the GPU's kernels lack: {', '.join(reasons)}")
    with ExitStack() as resources:
        progress.start("opening the GPU")
        device = resources.enter_context(Device(driver or open_driver()))
        opening = _Opening(model, settings, progress, device, resources)
        return opening.executor(cache if cache is not None else CubinCache())


class _Opening:
    """The steps of opening, and what they share."""

    def __init__(
        self,
        model: Model,
        settings: GPUSettings,
        progress: Progress,
        device: Device,
        resources: ExitStack,
    ) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        self.device, self.resources = device, resources
        spec = model.spec
        self.limits = ExecutorLimits(
            n_vocab=spec.n_vocab,
            n_pages=-(-settings.n_ctx // PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            max_step_tokens=settings.max_step_tokens,
            max_sequences=settings.max_sequences,
        )
        self.overlapped = device.info.capability >= (9, 0)

    def executor(self, cache: CubinCache) -> GPUExecutor:
        own = self.resources.callback
        free_bytes = self._free_bytes()
        weights = DeviceWeights(self.device, self.model)
        own(weights.close)
        sizes = CacheSizes(self.model.spec, self.settings.cache_type_k, self.settings.cache_type_v)
        self._check_fit(free_bytes, weights.n_bytes, sizes)
        pages = GPUPages(self.device, sizes, self.limits.n_pages)
        own(pages.close)
        stream = Stream(self.device, "steps")
        own(stream.close)
        pages.clear(stream)
        stream.synchronize()
        planner = StepPlanner(self.model, weights, pages, overlapped=self.overlapped)
        activation_bytes = needs_of(planner, self._shapes().biggest()).room_bytes
        held = weights.n_bytes + pages.n_bytes + activation_bytes + MARGIN_BYTES
        experts = self._experts(free_bytes - held)
        own(experts.close)
        shapes = self._shapes() if experts.is_complete else self._shared_shapes()
        results = self._results(shapes)
        exchange = None if experts.is_complete else self._exchange(shapes, results)
        self._load(weights, experts)
        planner = StepPlanner(
            self.model,
            weights,
            pages,
            mailboxes=exchange,
            max_deltas=experts.max_deltas,
            overlapped=self.overlapped,
        )
        needs = needs_of(planner, shapes.largest())
        functions = Functions(self.device, cache)
        own(functions.close)
        self._assemble(functions, needs)
        self._test_exchange(exchange, functions)
        room = DeviceBuffer(self.device, needs.room_bytes, "activations")
        own(room.close)
        ring = ControlRing(self.device, needs.block_bytes)
        own(ring.close)
        memory = self._memory(needs, experts, ring, results)
        steps = CapturedSteps(self.device, planner, functions, memory, ring, room)
        own(steps.close)
        self.progress.start("capturing graphs")
        for shape in shapes.first(StepKind.DECODE):
            steps.of(shape)
        return GPUExecutor(
            self.limits,
            GPUParts(
                device=self.device,
                stream=stream,
                pages=pages,
                experts=experts,
                exchange=exchange,
                shapes=shapes,
                steps=steps,
                results=results,
                resources=self.resources.pop_all(),
                facts=self._facts(weights, room, len(functions)),
            ),
        )

    def _experts(self, room_bytes: int) -> ExpertStore:
        """Who holds the experts: all of them on the GPU where they fit, else some."""
        wanted, n_expert = self.settings.moe_expert_cache, self.model.spec.n_expert_max
        fits = expert_bytes(self.model) <= room_bytes
        if n_expert == 0 or (fits and (wanted == -1 or wanted >= n_expert)):
            return ResidentExperts(self.device, self.model)
        from runtime.experts.cached_experts import CachedExperts, CacheSettings, slots_that_fit
        from runtime.experts.host_experts import HostExperts

        host = HostExperts(self.model.weights, self._moe_blocks())
        slots = slots_that_fit(host.layers, max(room_bytes, 0))
        if wanted != -1:
            slots = min(slots, wanted)
        if slots:
            self._pin(host)
        try:
            return CachedExperts(self.device, self.model.spec, host, CacheSettings(slots))
        except BaseException:
            host.close()
            raise

    def _pin(self, host: HostExperts) -> None:
        """Let the GPU copy from where the experts lie; without that nothing is swapped."""
        self.progress.start("pinning experts", host.n_bytes >> 20, "MiB")
        host.pin(self.device, lambda n_bytes: self.progress.advance(n_bytes >> 20))
        if host.why_not_pinned:
            logger.warning("the experts on the GPU stay what they are: %s", host.why_not_pinned)

    def _moe_blocks(self) -> list[MoeSpec]:
        return [block for _, block in moe_layers(self.model.spec)]

    def _shapes(self) -> StepShapes:
        """Of a model whose experts are all on the GPU."""
        return StepShapes(self.limits, LARGEST_BATCH)

    def _shared_shapes(self) -> StepShapes:
        """Of steps whose missed experts the CPU computes."""
        return StepShapes(self.limits, LARGEST_SHARED_BATCH)

    def _results(self, shapes: StepShapes) -> Results:
        n_outputs = max(shape.n_outputs for shape in shapes.largest())
        n_choices = int(np.prod(choices_shape(self.model.spec, shapes.max_batch))) + CHOICES_PADDING
        results = Results(self.device, n_outputs, logits_stride(self.limits.n_vocab), n_choices)
        self.resources.callback(results.close)
        return results

    def _exchange(self, shapes: StepShapes, results: Results) -> Exchange:
        """What has the CPU compute the experts that are not on the GPU."""
        from ops.cpu.team import TeamError, acquire_team
        from runtime.experts.exchange import Exchange, ExchangeSizes

        self.progress.start("preparing CPU kernels")
        try:
            team = acquire_team(self.settings.n_threads)
        except TeamError as error:
            raise ConfigError(f"n_threads = {self.settings.n_threads}: {error}") from error
        self.resources.callback(team.release)
        exchange = Exchange(
            self.device,
            team,
            self.model.weights,
            self._moe_blocks(),
            ExchangeSizes(n_tokens=shapes.max_batch),
            results.done_host,
        )
        self.resources.callback(exchange.close)
        return exchange

    def _test_exchange(self, exchange: Exchange | None, functions: Functions) -> None:
        """Raises: DeviceUnavailable where experts cannot be handed over here."""
        from runtime.experts.self_test import KERNELS, self_test

        if exchange is None or self.settings.exchange_rounds == 0:
            return
        self.progress.start("testing the exchange with the CPU")
        functions.load(KERNELS)
        result = self_test(
            self.device, exchange.team, functions.function, self.settings.exchange_rounds
        )
        logger.info(
            "exchange with the CPU: %d rounds, %.1f us each", result.rounds, result.microseconds
        )

    def _free_bytes(self) -> int:
        free, limit = self.device.free_bytes(), self.settings.vram_limit
        return free if limit is None else min(free, limit)

    def _check_fit(self, free_bytes: int, weights_bytes: int, sizes: CacheSizes) -> None:
        """Raises: DeviceUnavailable where what has to be on the GPU is larger than its memory."""
        needed = weights_bytes + sizes.n_bytes(self.limits.n_pages)
        if needed + MARGIN_BYTES > free_bytes:
            raise DeviceUnavailable(
                f"{needed / 2**30:.1f} GiB of dense weights, keys and values do not fit the "
                f"{free_bytes / 2**30:.1f} GiB of the GPU that may be used"
            )

    def _load(self, weights: DeviceWeights, experts: ExpertStore) -> None:
        total = weights.n_bytes + experts.n_bytes
        self.progress.start("moving weights to the GPU", total >> 20, "MiB")
        rest = 0

        def moved(n_bytes: int) -> None:
            nonlocal rest
            n_whole, rest = divmod(rest + n_bytes, 1 << 20)
            self.progress.advance(n_whole)

        weights.load(moved)
        experts.load(moved)

    def _assemble(self, functions: Functions, needs: Needs) -> None:
        self.progress.start("assembling GPU kernels", len(needs.kernels), "kernel")
        functions.load(needs.kernels.values(), self.progress.advance)

    def _memory(
        self, needs: Needs, experts: ExpertStore, ring: ControlRing, results: Results
    ) -> StepMemory:
        """The memory that all graphs share, with its first contents."""
        table = experts.table()
        words = np.array([FIRST_EPOCH, 0], np.uint32)
        parts = (slot_bytes(needs.control_bytes), slot_bytes(words.nbytes))
        state = DeviceBuffer(self.device, sum(parts) + slot_bytes(table.nbytes), "step state")
        self.resources.callback(state.close)
        control = state.address
        epoch = control + parts[0]
        table_at = epoch + parts[1]
        first = np.zeros(needs.control_bytes, np.uint8)
        transfers = [Transfer(control, first), Transfer(epoch, flat(words))]
        transfer_all(self.device, [*transfers, Transfer(table_at, flat(table))])
        return StepMemory(
            control=control,
            table=table_at,
            epoch=epoch,
            counter=epoch + 4,
            ring=ring.address,
            ring_stride=ring.stride,
            logits=results.logits_address,
            flags=results.flags_address,
            choices=results.choices_address,
            done=results.done_address,
        )

    def _facts(
        self, weights: DeviceWeights, room: DeviceBuffer, n_kernels: int
    ) -> dict[str, object]:
        info = self.device.info
        return {
            "device": "cuda",
            "gpu": info.name,
            "architecture": info.architecture,
            "driver": self.device.driver.version,
            "overlapped_launches": self.overlapped,
            "weights_bytes": weights.n_bytes,
            "activation_bytes": room.nbytes,
            "kernels": n_kernels,
        }
