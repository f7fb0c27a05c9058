"""CachedExperts: some routed experts on the GPU, the others where the table says.

The executor calls, for each step: `before_step` and the launch, `while_running`, and after its end
`after_step`. Only the first and the last lie between two steps, and both take microseconds;
decisions and the start of uploads happen while the GPU works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.gpu.expert import ADDRESSES
from ops.gpu.router import in_place, in_place_word
from runtime.cuda.device import Device
from runtime.cuda.memory import Arena, DeviceBuffer, arena_bytes
from runtime.engine.gpu.control import Delta
from runtime.engine.gpu.expert_launches import GROUPED_TOKENS, are_slot_formats
from runtime.engine.gpu.experts import empty_table, moe_layers
from runtime.engine.gpu.step_shape import SMALL_BATCHES
from runtime.engine.gpu.transfer import Transfer, flat, transfer_all
from runtime.experts.cache import NO_SLOT, Change, ExpertCache, LayerShape, Upload
from runtime.experts.fetched_experts import FetchedExperts
from runtime.experts.host_experts import HostExperts, HostPart, LayerExperts, bytes_at
from runtime.experts.policies import default_policy
from runtime.experts.policy import Policy
from runtime.experts.uploader import Uploader
from runtime.models.spec import ModelSpec

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

MAX_DELTAS = 64
UPLOADS_A_STEP = 4
"""At 2 ms a step and 2.7 MB an expert about 5 GB/s, of which the steps notice nothing."""

ON_CPU, ON_GPU, IN_PLACE, FETCHED, NOBODY = 0, 1, 2, 3, 4
N_KINDS = 5
IN_PLACE_SEED = 0

BY_SLOT_TOKENS = max(n for n in SMALL_BATCHES if n < GROUPED_TOKENS)
"""Of a step that may read experts in place as `in_place_every` says."""


@dataclass(frozen=True)
class CacheSettings:
    """How the cache behaves.

    slots           experts a layer that the GPU holds
    uploads_a_step  experts that may set out while a step runs; 0: what is there first stays
    fetches         prompts fetch what the GPU does not hold: the host's experts are pinned
    zero_copy       share of the experts without a slot that the GPU reads in place over the link,
                    0 to 1, if they are pinned; the CPU computes the others
    in_place_every  each so many'th of a token's misses of a layer is read in place besides, at
                    least 2; 0: none. Of few tokens only, and if they are pinned
    """

    slots: int
    uploads_a_step: int = UPLOADS_A_STEP
    fetches: bool = False
    zero_copy: float = 0.0
    in_place_every: int = 0


@dataclass
class Usage:
    """Who served the routed experts of all tokens so far.

    by_layer  i64[n_layers, 5]: on the CPU, on the GPU, in place, fetched; the last column means
              nothing
    uploads   experts that set out for the GPU
    """

    by_layer: NDArray[np.int64]
    uploads: int = 0

    @property
    def cpu_misses(self) -> int:
        return int(self.by_layer[:, ON_CPU].sum())

    @property
    def hits(self) -> int:
        return int(self.by_layer[:, ON_GPU].sum())

    @property
    def in_place(self) -> int:
        return int(self.by_layer[:, IN_PLACE].sum())

    @property
    def fetched(self) -> int:
        return int(self.by_layer[:, FETCHED].sum())


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
        """Allocates; `load` fills.  The host's experts are pinned before, or never.

        Raises: OutOfDeviceMemory, CudaError.
        """
        self._device, self._spec, self._host, self._settings = device, spec, host, settings
        self._rows = [index * max(spec.n_expert_max, 1) for index, _ in moe_layers(spec)]
        sizes = [layer.slot_bytes for layer in host.layers]
        counts: dict[int, int] = {}
        for layer, size in zip(host.layers, sizes, strict=True):
            counts[size] = counts.get(size, 0) + min(settings.slots, layer.n_expert)
        self._slots: list[int] = []
        with ExitStack() as resources:
            classes = self._take_slots(counts, resources)
            self.fetches = self._fetches(resources)
            self._uploader = Uploader(
                device, host.layers, self._slots.__getitem__, max(settings.uploads_a_step, 1)
            )
            resources.callback(self._uploader.close)
            n_bytes = 8 * ADDRESSES * max(len(host.layers) * spec.n_expert_max, 1)
            self._host_rows = resources.enter_context(DeviceBuffer(device, n_bytes, "host rows"))
            self._resources = resources.pop_all()
        shapes = [LayerShape(la.n_expert, s) for la, s in zip(host.layers, sizes, strict=True)]
        self.cache = ExpertCache(shapes, classes)
        self._policy = policy(self.cache)
        shares = np.random.default_rng(IN_PLACE_SEED).random(self.cache.slot_of.shape)
        self._in_place = (shares < settings.zero_copy) & host.pinned
        self._kinds = np.where(self._in_place, IN_PLACE, ON_CPU).astype(np.int8)
        self.usage = Usage(np.zeros((len(host.layers), N_KINDS), np.int64))
        self._layer_index = np.arange(len(host.layers))[:, None, None]
        wanted = settings.in_place_every > 0 and host.pinned
        self._by_slot = np.array(
            [wanted and are_slot_formats(layer.formats) for layer in host.layers], np.bool_
        )
        self._seen: list[I32] = []

    def _take_slots(self, counts: Mapping[int, int], resources: ExitStack) -> list[int]:
        """Allocate the slots; their size classes, which are their bytes."""
        self.n_bytes = arena_bytes(counts)
        if not self.n_bytes:
            return []
        arena = resources.enter_context(Arena(self._device, counts, "expert cache"))
        classes = []
        for size, count in counts.items():
            slots = [arena.take(size) for _ in range(count)]
            self._slots += [slot.address for slot in slots if slot is not None]
            classes += [size] * count
        return classes

    def _fetches(self, resources: ExitStack) -> FetchedExperts | None:
        if not (self._settings.fetches and self._host.layers):
            return None
        fetches = FetchedExperts(self._device, self._host.layers)
        resources.callback(fetches.close)
        return fetches

    def load(self, moved: Callable[[int], None]) -> None:
        """Fill the slots with the policy's first experts; `moved` gets the bytes of each piece.

        Raises: PinningFailed, CudaError; whatever `moved` raises.
        """
        transfers: list[Transfer] = []
        for layer, expert in self._policy.first(self.cache):
            upload = self.cache.fill(layer, expert)
            if upload is not None:
                transfers += self._transfers(upload)
                self._kinds[layer, expert] = ON_GPU
        transfer_all(self._device, transfers, moved)
        if self._by_slot.any():
            self._load_host_rows()

    def _load_host_rows(self) -> None:
        """Where kernels find every expert in the host's memory, in rows like the table's."""
        rows = np.zeros((*self.cache.slot_of.shape, ADDRESSES), np.uint64)
        for layer, experts in enumerate(self._host.layers):
            for column, m in enumerate(experts.matrices):
                rows[layer, :, column] = m.address + m.stride * np.arange(rows.shape[1])
        transfer_all(self._device, [Transfer(self._host_rows.address, flat(rows))])

    def table(self) -> U64:
        """See `ExpertStore.table`."""
        table = empty_table(self._spec)
        rows = table.reshape(-1, table.shape[-1])
        for layer, experts in enumerate(self._host.layers):
            for expert in range(experts.n_expert):
                slot = int(self.cache.slot_of[layer, expert])
                row, *addresses = self._delta(Change(layer, expert, slot))
                rows[row, :3] = addresses
                if self._by_slot[layer]:
                    index = layer * self.cache.slot_of.shape[1] + expert
                    at = self._host_rows.address + 8 * ADDRESSES * index
                    rows[row, 3] = in_place_word(at, self._settings.in_place_every)
        return table

    def before_step(self) -> Sequence[Delta]:
        """See `ExpertStore.before_step`.  Raises: DeviceLost, CudaError."""
        for upload in self._uploader.arrived():
            self.cache.arrived(upload)
        changes = self.cache.begin_step(MAX_DELTAS)
        for change in changes:
            kind = IN_PLACE if self._in_place[change.layer, change.expert] else ON_CPU
            kind = kind if change.slot == NO_SLOT else ON_GPU
            self._kinds[change.layer, change.expert] = kind
        return [self._delta(change) for change in changes]

    def while_running(self) -> None:
        """Decide on swaps, and start uploads, while a step runs.  Raises: DeviceLost, CudaError."""
        self._count_seen()
        room = self._settings.uploads_a_step - self.cache.n_pending if self._host.pinned else 0
        for swap in self._policy.swaps(self.cache, room):
            self.cache.replace(*swap.expert, swap.victim)
        for upload in self.cache.startable(self._uploader.room):
            self._uploader.start(upload)
            self.usage.uploads += 1

    def after_step(self, choices: I32, *, fetched: bool = False) -> None:
        """The step has ended, well or not; choices i32[n_moe_layers, n_tokens, n_used] are the
        experts that it used, -1 where a layer uses fewer."""
        self.cache.end_step()
        counted = self._count(choices)
        if fetched:
            counted[:, FETCHED] += counted[:, ON_CPU]
            counted[:, ON_CPU] = 0
        self.usage.by_layer += counted
        self._seen.append(choices.copy())

    def _count_seen(self) -> None:
        """Tell the policy of the steps that have ended."""
        for choices in self._seen:
            self._policy.used(choices)
        self._seen.clear()

    def _count(self, choices: I32) -> NDArray[np.int64]:
        """i64[n_layers, 5]: where what was chosen is."""
        n_layers, n_expert = self._kinds.shape
        if choices.size > self._kinds.size:  # experts, not choices: a prompt's take 20 ms longer
            cells = choices + (1 + (n_expert + 1) * self._layer_index)
            uses = np.bincount(cells.reshape(-1), minlength=n_layers * (n_expert + 1))
            weights = uses.reshape(n_layers, n_expert + 1)[:, 1:]
            kinds = self._kinds + N_KINDS * self._layer_index[:, 0]
            counted = np.bincount(kinds.reshape(-1), weights.reshape(-1), N_KINDS * n_layers)
        else:
            kinds = self._kinds[self._layer_index, choices]
            if choices.shape[1] <= BY_SLOT_TOKENS and self._by_slot.any():
                missed = (kinds == ON_CPU) & self._by_slot[:, None, None] & (choices >= 0)
                kinds[in_place(missed, self._settings.in_place_every)] = IN_PLACE
            if int(choices.min(initial=0)) < 0:
                kinds[choices < 0] = NOBODY
            cells = kinds + N_KINDS * self._layer_index
            counted = np.bincount(cells.reshape(-1), minlength=N_KINDS * n_layers)
        return counted.reshape(n_layers, N_KINDS).astype(np.int64)

    def describe(self) -> dict[str, object]:
        usage = self.usage
        return {
            "experts": f"{self._settings.slots} a layer on the GPU",
            "expert_bytes": self.n_bytes,
            "expert_slots": self.cache.n_slots,
            "expert_swaps": self._host.why_not_pinned or "on",
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

    def _transfers(self, upload: Upload) -> list[Transfer]:
        target = self._slots[upload.slot]
        return [
            Transfer(target + m.offset, bytes_at(m.host + upload.expert * m.stride, m.n_bytes))
            for m in self._host.layers[upload.layer].matrices
        ]

    def _delta(self, change: Change) -> Delta:
        layer, expert = change.layer, change.expert
        row = self._rows[layer] + expert
        matrices = self._host.layers[layer].matrices
        if change.slot != NO_SLOT:
            gate, up, down = (self._slots[change.slot] + m.offset for m in matrices)
        elif self._in_place[layer, expert]:
            gate, up, down = (m.address + expert * m.stride for m in matrices)
        else:
            gate = up = down = 0
        return row, gate, up, down


def slots_that_fit(layers: Sequence[LayerExperts], n_bytes: int) -> int:
    """Slots of every layer that fit in n_bytes of the GPU's memory, at most what a layer has."""
    a_layer_each = sum(layer.slot_bytes for layer in layers)
    most = max((layer.n_expert for layer in layers), default=0)
    return min(most, n_bytes // a_layer_each) if a_layer_each else 0


def cache_bytes(layers: Sequence[LayerExperts], slots: int) -> int:
    """What a cache of so many slots a layer allocates."""
    return sum(layer.slot_bytes * min(slots, layer.n_expert) for layer in layers)
