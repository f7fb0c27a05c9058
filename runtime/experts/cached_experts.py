"""CachedExperts: some routed experts on the GPU, the others where the table says.

The executor calls, for each step: `before_step` and the launch, `while_running` once the loop has
nothing else to do, and after its end `after_step`. Only the first and the last lie between two
steps, and both take microseconds; decisions and the start of uploads happen while the GPU works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.memory import Arena, arena_bytes
from runtime.engine.gpu.control import Delta
from runtime.engine.gpu.expert_launches import GROUPED_TOKENS
from runtime.engine.gpu.experts import empty_table, moe_layers
from runtime.engine.gpu.step_shape import SMALL_BATCHES
from runtime.errors import OutOfDeviceMemory
from runtime.experts.cache import NO_SLOT, Change, Expert, ExpertCache, LayerShape, Upload
from runtime.experts.cache_settings import CacheSettings
from runtime.experts.expert_kinds import ExpertKind, ExpertKinds
from runtime.experts.fetched_experts import FetchedExperts
from runtime.experts.first_experts import START_SECONDS, load_first
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.in_place_reads import InPlaceReads
from runtime.experts.policies import default_policy
from runtime.experts.policy import Policy
from runtime.experts.served import Usage, UseCounter
from runtime.experts.totals import (
    FETCHED,
    IN_PLACE,
    N_KINDS,
    ON_CPU,
    ON_GPU,
    ExpertTotals,
    StepUse,
)
from runtime.experts.upload_budget import UploadBudget
from runtime.experts.uploader import Uploader
from runtime.models.spec import ModelSpec
from runtime.profiling.record import Span

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

MAX_DELTAS = 64
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
    ) -> None:
        """Allocates; `load` fills.  The host's experts are used as they become pinned.

        Raises: OutOfDeviceMemory, CudaError.
        """
        self._device, self._spec, self._host, self._settings = device, spec, host, settings
        self._rows = [index * max(spec.n_expert_max, 1) for index, _ in moe_layers(spec)]
        sizes = [layer.slot_bytes for layer in host.layers]
        self._slots: list[int] = []
        self._arena: Arena | None = None
        with ExitStack() as resources:
            resources.callback(self._give_slots)
            classes = self._take_slots()
            self.fetches = self._fetches(resources)
            most = max(settings.uploads_a_step, 1)
            self._uploader = Uploader(device, host, self._slots.__getitem__, most)
            resources.callback(self._uploader.close)
            self._reads = InPlaceReads(device, host, spec.n_expert_max, BY_SLOT_TOKENS)
            resources.callback(self._reads.close)
            self._resources = resources.pop_all()
        shapes = [LayerShape(la.n_expert, s) for la, s in zip(host.layers, sizes, strict=True)]
        self.cache = ExpertCache(shapes, classes)
        self._policy = policy(self.cache)
        shares = np.random.default_rng(IN_PLACE_SEED).random(self.cache.slot_of.shape)
        self._wanted_in_place = shares < settings.zero_copy
        self._pinned = host.pinned_experts
        self._in_place = self._wanted_in_place & self._pinned
        self._now_in_place: deque[Expert] = deque()  # the table does not say so yet
        self._kinds = ExpertKinds(np.where(self._in_place, IN_PLACE, ON_CPU).astype(np.int8))
        self._counter = UseCounter(self._kinds.ended)
        self._budget = UploadBudget(settings.uploads_a_step)
        self.usage = Usage(np.zeros((len(host.layers), N_KINDS), np.int64))
        self._expert_bytes = np.array(
            [sum(matrix.n_bytes for matrix in layer.matrices) for layer in host.layers], np.int64
        )
        self._offsets = [[matrix.offset for matrix in layer.matrices] for layer in host.layers]
        self._upload_bytes: list[int] = self._expert_bytes.tolist()
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
        for upload in self._uploader.settle():
            self.cache.arrived(upload)
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
        self._now_in_place.clear()
        kinds = np.where(self._in_place, IN_PLACE, ON_CPU).astype(np.int8)
        uploads = self.cache.refill(classes, best)
        for upload in uploads:
            kinds[upload.layer, upload.expert] = ON_GPU
        load_first(self._device, self._host, uploads, self._slots.__getitem__, int)
        self._kinds.reset(kinds)
        return self._settings

    def empty(self) -> None:
        """Hold no expert any longer: no step is in flight, and the table names none."""
        self._settings = replace(self._settings, slots=0, layer_slots=None)
        self._give_slots()
        self.cache.refill(self._take_slots(), [])
        self._kinds.reset(np.where(self._in_place, IN_PLACE, ON_CPU).astype(np.int8))

    def _fetches(self, resources: ExitStack) -> FetchedExperts | None:
        if not (self._settings.fetches and self._host.layers):
            return None
        fetches = FetchedExperts(self._device, self._host.layers)
        resources.callback(fetches.close)
        return fetches

    def load(self, moved: Callable[[int], None]) -> int:
        """Fill the slots with the policy's first experts; `moved` gets the bytes of each piece.
        Those that take too long come while the engine serves, as others do later.

        Raises: PinningFailed, CudaError; whatever `moved` raises.
        """
        uploads: list[Upload] = []
        kinds = self._kinds.ended.copy()
        for layer, expert in self._policy.first(self.cache):
            upload = self.cache.fill(layer, expert)
            if upload is not None:
                uploads.append(upload)
                kinds[layer, expert] = ON_GPU
        seconds = START_SECONDS if self._settings.uploads_a_step else inf
        for upload in load_first(
            self._device, self._host, uploads, self._slots.__getitem__, moved, seconds
        ):
            self.cache.unfill(upload)
            kinds[upload.layer, upload.expert] = self._kinds.ended[upload.layer, upload.expert]
        self._kinds.reset(kinds)
        return 0

    def show(self, kinds: I8) -> None:
        """See `ExpertStore.show`."""
        self._kinds.show(kinds)

    def table(self) -> U64:
        """See `ExpertStore.table`."""
        table = empty_table(self._spec)
        rows = table.reshape(-1, table.shape[-1])
        words = self._reads.words()
        for layer, experts in enumerate(self._host.layers):
            for expert in range(experts.n_expert):
                slot = int(self.cache.slot_of[layer, expert])
                row, *addresses = self._delta(Change(layer, expert, slot))
                rows[row] = (*addresses, words[layer, expert])
        return table

    def before_step(self) -> Sequence[Delta]:
        """See `ExpertStore.before_step`.  Raises: DeviceLost, CudaError."""
        self._budget.step_begins()
        for upload in self._uploader.arrived():
            self.cache.arrived(upload)
        changes = self.cache.begin_step(MAX_DELTAS)
        while self._now_in_place and len(changes) < MAX_DELTAS:
            place = self._now_in_place.popleft()
            if self.cache.slot_of[place] == NO_SLOT:
                changes.append(Change(*place, NO_SLOT))
        kinds: list[ExpertKind] = []
        deltas: list[Delta] = []
        for change in changes:
            layer, expert, slot = change
            deltas.append(self._delta(change))
            if slot != NO_SLOT:
                kinds.append(((layer, expert), ON_GPU))
            else:
                kind = IN_PLACE if self._in_place.item(layer, expert) else ON_CPU
                kinds.append(((layer, expert), kind))
        self._kinds.begin_step(kinds)
        return deltas

    def while_running(self) -> None:
        """Decide on swaps, and start uploads, while a step runs.  Raises: DeviceLost, CudaError."""
        self._count_seen()
        if self._host.pinned_experts is not self._pinned:
            self._see_pinned(self._host.pinned_experts)
        pins_all = self._host.pins_all  # those that are not pinned yet soon will be
        seconds = self._uploader.seconds
        room = self._budget.decisions(seconds, self.cache.n_pending, pinned=pins_all)
        for swap in self._policy.swaps(self.cache, room):
            if self._pinned[swap.expert] or not pins_all:
                self.cache.replace(*swap.expert, swap.victim)
        most = min(self._budget.a_step(seconds), self._uploader.room)
        uploads = self.cache.startable(most)
        self._uploader.start(uploads)
        self.usage.uploads += len(uploads)
        self.usage.upload_bytes += sum(self._upload_bytes[upload.layer] for upload in uploads)

    def _see_pinned(self, pinned: NDArray[np.bool_]) -> None:
        """More experts are pinned: the next steps may read them in place."""
        in_place = self._wanted_in_place & pinned
        new = np.argwhere(in_place & ~self._in_place).tolist()
        self._now_in_place.extend((layer, expert) for layer, expert in new)
        self._pinned, self._in_place = pinned, in_place

    @property
    def may_fetch(self) -> bool:
        """Whether a step that fetches may begin now: all experts are pinned."""
        return self.fetches is not None and self._host.pinned

    def after_step(self, choices: I32, *, fetched: bool = False) -> tuple[StepUse, ...]:
        """The step has ended, well or not; choices i32[n_moe_layers, n_tokens, n_used] are the
        experts that it used, -1 where a layer uses fewer. What served them."""
        self.cache.end_step()
        kinds = self._kinds.end_step()
        counts = self._counter.counted(choices, self._reads.rule)
        if fetched:
            counts[..., FETCHED] += counts[..., ON_CPU]
            counts[..., ON_CPU] = 0
            moved = (kinds == ON_CPU).sum(axis=1) @ self._expert_bytes
            self.usage.fetch_bytes += int(moved)
        self.usage.by_layer += counts[0] if len(counts) == 1 else counts.sum(axis=0)
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

    def _delta(self, change: Change) -> Delta:
        layer, expert, slot = change
        row = self._rows[layer] + expert
        if slot != NO_SLOT:
            address, (gate, up, down) = self._slots[slot], self._offsets[layer]
            return row, address + gate, address + up, address + down
        if self._in_place.item(layer, expert):
            matrices = self._host.layers[layer].matrices
            gate, up, down = (m.host + expert * m.stride for m in matrices)
            return row, gate, up, down
        return row, 0, 0, 0
