"""CachedExperts: some routed experts on the GPU, the others where the table says.

The executor calls, for each step: `before_step` and the launch, `while_running` once the loop has
nothing else to do, and after its end `after_step`. Only the first and the last lie between two
steps, and both take microseconds; decisions and the start of uploads happen while the GPU works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.memory import Arena, arena_bytes
from runtime.engine.gpu.control import Deltas
from runtime.engine.gpu.expert_launches import GROUPED_TOKENS
from runtime.engine.gpu.experts import empty_table
from runtime.engine.gpu.step_shape import SMALL_BATCHES
from runtime.engine.gpu.transfer import Refused
from runtime.errors import OutOfDeviceMemory
from runtime.experts.cache import ExpertCache, LayerShape, Rows
from runtime.experts.cache_settings import CacheSettings
from runtime.experts.expert_table import ExpertTable
from runtime.experts.fetched_experts import FetchedExperts
from runtime.experts.first_experts import START_SECONDS, load_first
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.in_place_reads import InPlaceReads
from runtime.experts.policies import default_policy
from runtime.experts.policy import Policy
from runtime.experts.served import Usage, UseCounter
from runtime.experts.totals import (
    FETCHED,
    N_KINDS,
    ON_CPU,
    ExpertTotals,
    StepUse,
)
from runtime.experts.upload_budget import UploadBudget
from runtime.experts.uploader import Uploader
from runtime.models.spec import ModelSpec
from runtime.profiling.record import Span

logger = logging.getLogger(__name__)

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

MAX_DELTAS = 64
RULE = 3
"""Column of the table: which misses are read in place."""
IN_PLACE_SEED = 0

BY_SLOT_TOKENS = max(n for n in SMALL_BATCHES if n < GROUPED_TOKENS)
"""Of a step that may read experts in place as `in_place_every` says."""


class CachedExperts:
    """An `ExpertStore` (see `runtime.engine.gpu.experts`) that changes with use."""

    is_complete = False
    max_deltas = MAX_DELTAS

    def __init__(
        self,
        device: Device,
        spec: ModelSpec,
        host: HostExperts | HostPart,
        settings: CacheSettings,
        policy: Callable[[ExpertCache], Policy] = default_policy,
        tell: Callable[[str], object] = logger.warning,
    ) -> None:
        """Allocates; `load` fills.  The host's experts are used as they become pinned.

        tell: gets why uploads cost more than they need
        Raises: OutOfDeviceMemory, CudaError.
        """
        self._device, self._spec, self._host, self._settings = device, spec, host, settings
        self._tell = tell
        self._rows = [index * max(spec.n_expert_max, 1) for index, _ in spec.moe_layers]
        sizes = [layer.slot_bytes for layer in host.layers]
        self._slots: list[int] = []
        self._arena: Arena | None = None
        with ExitStack() as resources:
            resources.callback(self._give_slots)
            classes = self._take_slots()
            self.fetches = self._fetches(resources)
            most = max(settings.uploads_a_step, 1)
            n_expert = max((layer.n_expert for layer in host.layers), default=0)
            self._uploader = Uploader(device, host, n_expert, most, tell)
            resources.callback(self._uploader.close)
            self._reads = InPlaceReads(device, host, spec.n_expert_max, BY_SLOT_TOKENS)
            resources.callback(self._reads.close)
            self._resources = resources.pop_all()
        shapes = [LayerShape(la.n_expert, s) for la, s in zip(host.layers, sizes, strict=True)]
        self.cache = ExpertCache(shapes, classes)
        self._table = ExpertTable(host.layers, n_expert, self._rows, MAX_DELTAS)
        self.cache.follow(self._table.address, self._uploader.copies.address)
        self._policy = policy(self.cache)
        shares = np.random.default_rng(IN_PLACE_SEED).random(self.cache.slot_of.shape)
        self._wanted_in_place = shares < settings.zero_copy
        self._use_pinned(host.pinned_experts)
        self._budget = UploadBudget(settings.uploads_a_step)
        self.usage = Usage(np.zeros((len(host.layers), N_KINDS), np.int64))
        self._counter = UseCounter(self._table.ended, self.usage.by_layer)
        self._expert_bytes = np.array(
            [sum(matrix.n_bytes for matrix in layer.matrices) for layer in host.layers], np.int64
        )
        self._reads.set(settings.in_place_every)
        self._seen: list[I32] = []

    def read_in_place(self, every: int) -> U64 | None:
        """Have each `every`th of a token's misses of a layer read in place, 0: none, from the next
        step on: no step is in flight.  The fourth words of the table's rows, [n_layers, n_expert],
        that are to be there then; None: that cannot be, and none is.

        Raises: CudaError.
        """
        possible = self._reads.set(every)
        self._settings = replace(self._settings, in_place_every=every if possible else 0)
        return self._reads.words() if possible else None

    @property
    def host(self) -> HostExperts | HostPart:
        """Where the experts lie."""
        return self._host

    @property
    def rows(self) -> list[int]:
        """The first row of each layer in the table."""
        return self._rows

    def _take_slots(self) -> list[int]:
        """Allocate the slots; their size classes, which are their bytes."""
        counts: dict[int, int] = {}
        for index, layer in enumerate(self._host.layers):
            n_slots = self._settings.slots_of(index, layer)
            counts[layer.slot_bytes] = counts.get(layer.slot_bytes, 0) + n_slots
        self.n_bytes = arena_bytes(counts)
        if not self.n_bytes:
            return []
        self._arena = Arena(self._device, counts, "expert cache")
        classes = []
        for size, count in counts.items():
            slots = [self._arena.take(size) for _ in range(count)]
            self._slots += [slot.address for slot in slots if slot is not None]
            classes += [size] * count
        return classes

    def _give_slots(self) -> None:
        arena, self._arena = self._arena, None
        self._slots.clear()
        if arena is not None:
            arena.close()

    @property
    def settings(self) -> CacheSettings:
        return self._settings

    def resize(self, settings: CacheSettings) -> CacheSettings:
        """Hold as many experts as `settings` say: those that are there first, then the most used.

        No step is in flight, and the table is written anew before the next.  Blocks until all are
        there.  Returns what there was memory for, if that is less.
        Raises: PinningFailed, CudaError.
        """
        self._count_seen()
        self.cache.begin_step(self._uploader.settle(), 0)
        self.cache.end_step()
        resident = self.cache.resident
        best = sorted(self._policy.first(self.cache), key=lambda expert: not resident[expert])
        self._give_slots()
        self._settings = settings
        while True:
            try:
                classes = self._take_slots()
                break
            except OutOfDeviceMemory:
                if not self._settings.slots:
                    raise
                self._settings = self._settings.halved()
        uploads = self.cache.refill(classes, best)
        load_first(self._device, self._host, uploads, self._slots.__getitem__, int, tell=self._tell)
        self._slots_hold()
        return self._settings

    def _slots_hold(self) -> None:
        """No step is in flight, and the next one finds in the slots what the cache says."""
        self._uploader.copies.use(self._slots, self._host.undivided_experts)
        self._table.reset(self._slots, self.cache.slot_of)

    def empty(self) -> None:
        """Hold no expert any longer: no step is in flight, and the table names none."""
        self._settings = replace(self._settings, slots=0, layer_slots=None)
        self._give_slots()
        self.cache.refill(self._take_slots(), [])
        self._slots_hold()

    def _fetches(self, resources: ExitStack) -> FetchedExperts | None:
        if not (self._settings.fetches and self._host.layers):
            return None
        fetches = FetchedExperts(self._device, self._host.layers)
        resources.callback(fetches.close)
        return fetches

    def load(self, moved: Callable[[int], None]) -> Refused:
        """Fill the slots with the policy's first experts; `moved` gets the bytes of each piece.
        Those that take too long come while the engine serves, as others do later.

        Raises: PinningFailed, CudaError; whatever `moved` raises.
        """
        experts = self._policy.first(self.cache)
        filled = (self.cache.fill(layer, expert) for layer, expert in experts)
        uploads = [upload for upload in filled if upload is not None]
        seconds = START_SECONDS if self._settings.uploads_a_step else inf
        for upload in load_first(
            self._device, self._host, uploads, self._slots.__getitem__, moved, seconds, self._tell
        ):
            self.cache.unfill(upload)
        self._slots_hold()
        return Refused()

    def show(self, kinds: I8) -> None:
        """See `ExpertStore.show`."""
        self._table.show(kinds)

    def table(self) -> U64:
        """See `ExpertStore.table`."""
        table = empty_table(self._spec)
        rows, n_expert = table.reshape(-1, table.shape[-1]), self.cache.slot_of.shape[1]
        places, words = self._table.places(self.cache.slot_of), self._reads.words()
        for layer, first in enumerate(self._rows):
            rows[first : first + n_expert, :RULE] = places[layer]
            rows[first : first + n_expert, RULE] = words[layer, :n_expert]
        return table

    def before_step(self) -> Deltas:
        """See `ExpertStore.before_step`.  Raises: DeviceLost, CudaError."""
        self._budget.step_begins()
        changes = self.cache.begin_step(self._uploader.arrived(), MAX_DELTAS)
        return self._table.deltas(changes.n)

    def while_running(self) -> None:
        """Decide on swaps, and start uploads, while a step runs.  Raises: DeviceLost, CudaError."""
        self._count_seen()
        host, uploader = self._host, self._uploader
        if host.pinned_experts is not self._pinned:
            self._see_pinned(host.pinned_experts)
        pins_all = self._all_pinned or host.pins_all  # what is not pinned yet soon will be
        most = self._budget.a_step(uploader.seconds)
        room = self._budget.decisions(most, self.cache.n_pending, pinned=pins_all)
        swaps = self._policy.swaps(self.cache, room)
        if pins_all and not self._all_pinned:
            swaps = Rows.of(swaps.values[self._pinned.reshape(-1)[swaps.values[:, 0]]])
        uploads = self.cache.swap(swaps, min(most, uploader.room(pinned=pins_all)))
        self.usage.uploads += uploads.n
        self.usage.upload_bytes += uploader.start(uploads)

    def _see_pinned(self, pinned: NDArray[np.bool_]) -> None:
        """More experts are pinned: the next steps may read them in place."""
        new = self._wanted_in_place & pinned & ~self._pinned
        self._use_pinned(pinned)
        self.cache.moved(np.flatnonzero(new).tolist())

    def _use_pinned(self, pinned: NDArray[np.bool_]) -> None:
        self._pinned, self._all_pinned = pinned, bool(pinned.all())
        self._table.read_in_place(self._wanted_in_place & pinned)
        self._uploader.copies.use(self._slots, self._host.undivided_experts)

    @property
    def may_fetch(self) -> bool:
        """Whether a step that fetches may begin now: all experts are pinned."""
        return self.fetches is not None and self._host.pinned

    def after_step(self, choices: I32, *, fetched: bool = False) -> tuple[StepUse, ...]:
        """The step has ended, well or not; choices i32[n_moe_layers, n_tokens, n_used] are the
        experts that it used, -1 where a layer uses fewer. What served them."""
        self.cache.end_step()
        counts = self._counter.counted(choices, self._reads.rule)
        if fetched:
            on_cpu = counts[..., ON_CPU].copy()
            counts[..., FETCHED] += on_cpu
            counts[..., ON_CPU] = 0
            self.usage.by_layer[:, FETCHED] += on_cpu.sum(axis=0)
            self.usage.by_layer[:, ON_CPU] -= on_cpu.sum(axis=0)
            moved = (self._table.ended == ON_CPU).sum(axis=1) @ self._expert_bytes
            self.usage.fetch_bytes += int(moved)
        self._seen.append(choices.copy())
        return (StepUse(counts, self._expert_bytes),)

    def totals(self) -> ExpertTotals:
        """See `ExpertStore.totals`."""
        totals = self.usage.totals(self._expert_bytes, f"cuda:{self._device.info.index}")
        meter = self._uploader.meter
        if not meter.seconds:
            return totals
        rate = meter.n_bytes / meter.seconds / 1e9
        return replace(totals, links=tuple(replace(link, gb_s=rate) for link in totals.links))

    def take_spans(self) -> list[Span]:
        """See `StepExperts.take_spans`."""
        return self._uploader.meter.take_spans()

    def _count_seen(self) -> None:
        """Tell the policy of the steps that have ended."""
        for choices in self._seen:
            self._policy.used(choices)
        self._seen.clear()

    def describe(self) -> dict[str, object]:
        usage = self.usage
        return {
            "experts": self._settings.words,
            "expert_bytes": self.n_bytes,
            "expert_slots": self.cache.n_slots,
            "expert_swaps": "on" if self._settings.uploads_a_step else "off",
            **self._host.describe(),
            "expert_hits": usage.hits,
            "expert_cpu_misses": usage.cpu_misses,
            "expert_in_place_reads": usage.in_place,
            "expert_fetched": usage.fetched,
            "expert_uploads": usage.uploads,
        }

    def close(self) -> None:
        """Give everything back; no step is in flight.  Raises: CudaError."""
        self._count_seen()  # the last step's choices, for the profile
        self._resources.close()
        self._host.close()
