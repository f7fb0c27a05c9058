"""ExpertMemories: the GPUs' memory for experts, which grows and shrinks between steps.

Which experts are on a GPU never changes a bit of a result, so neither does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.cuda.device import Device
from runtime.cuda.stream import Stream
from runtime.engine.gpu.expert_plan import (
    ExpertPlan,
    Holding,
    MoeLayer,
    even_slots,
    moe_layers_of,
    slots_bytes,
    whole_layer_slots,
)
from runtime.engine.gpu.experts import U64, ExpertStore, empty_table
from runtime.engine.gpu.plan_parts import StepMemory
from runtime.engine.gpu.share_plan import SharePlan
from runtime.engine.gpu.transfer import Transfer, flat, transfer_all
from runtime.errors import ConfigError
from runtime.experts.cached_experts import RULE, CachedExperts
from runtime.notices import Notices, Reason


class ExpertMemory:
    """Of one GPU that holds some of its experts."""

    def __init__(
        self,
        device: Device,
        planned: SharePlan,
        plan: ExpertPlan,
        store: ExpertStore,
        memory: StepMemory,
    ) -> None:
        """memory: where the table of experts is."""
        self._device, self._planned, self.plan = device, planned, plan
        self._store, self._table = store, memory.table
        model = planned.share.model
        blocks = [block for _, block in model.spec.moe_layers]
        self._layers: list[MoeLayer] = moe_layers_of(model.weights, blocks)

    def room(self, vram_limit: int | None) -> int:
        """Bytes for experts where so much of the GPU's memory is to be used; None: all that is
        free.  Raises: CudaError."""
        experts = self.plan.n_bytes + self.plan.fetch_bytes
        held = self._planned.dense_bytes + experts
        usable = self._device.free_bytes() + held
        if vram_limit is not None:
            usable = min(usable, vram_limit)
        return usable - self._planned.dense_bytes - self._planned.settings.reserve_bytes

    def resize(self, room: int) -> None:
        """Hold what fits so many bytes; no step is in flight.  Blocks until it is there.

        Where that fails no expert is there: the CPU computes them, until it succeeds.
        Raises: PinningFailed, CudaError.
        """
        store, left = self._store, max(room - self.plan.fetch_bytes, 0)
        if not isinstance(store, CachedExperts):
            return
        whole = self.plan.holding is Holding.LAYERS
        slots = (whole_layer_slots if whole else even_slots)(self._layers, left)
        settings = replace(
            store.settings, slots=max(slots, default=0), layer_slots=slots if whole else None
        )
        emptied = store.table()
        emptied[..., :RULE] = 0
        self._write(emptied)  # before any slot is given back
        try:
            store.resize(settings)
            self._write(store.table())
        except BaseException:
            store.empty()
            raise
        finally:
            self._plan_anew(store, whole=whole)

    def _write(self, table: U64) -> None:
        transfer_all(self._device, [Transfer(self._table, flat(table))])

    def _plan_anew(self, store: CachedExperts, *, whole: bool) -> None:
        """The plan by what there is now; whole: of layers."""
        made = store.settings
        held = [made.slots_of(at, layer.experts) for at, layer in enumerate(self._layers)]
        holding = Holding.LAYERS if whole else Holding.CACHE if any(held) else Holding.NONE
        self.plan = replace(
            self.plan,
            holding=holding,
            slots=tuple(held),
            n_bytes=slots_bytes(self._layers, held),
            reason="resized",
        )

    def read_in_place(self, every: int) -> bool:
        """See `CachedExperts.read_in_place`.  Raises: CudaError."""
        store = self._store
        words = store.read_in_place(every) if isinstance(store, CachedExperts) else None
        if words is None or not isinstance(store, CachedExperts):
            return False
        # Whatever else the table says is as far as the steps' changes have come.
        table = empty_table(self._planned.share.model.spec)
        with Stream(self._device, "rule of misses") as stream:
            stream.download(table.ctypes.data, self._table, table.nbytes)
            stream.synchronize()
            rows = table.reshape(-1, table.shape[-1])
            for first, layer in zip(store.rows, words, strict=True):
                rows[first : first + len(layer), RULE] = layer
            stream.upload(self._table, table.ctypes.data, table.nbytes)
            stream.synchronize()
        return True


class ExpertMemories:
    """Of all GPUs that hold some of their experts."""

    def __init__(self, parts: Sequence[ExpertMemory], notices: Notices) -> None:
        self._parts, self._notices = tuple(parts), notices

    @property
    def n_bytes(self) -> int:
        """Of the experts that are there."""
        return sum(part.plan.n_bytes for part in self._parts)

    def resize(self, vram_limit: int | None) -> int:
        """Use so much of each GPU's memory, None: all that is free; returns the experts' bytes.

        No step is in flight.  Blocks.
        Raises: ConfigError where no GPU holds just some experts, or what else is there takes more;
        PinningFailed, CudaError.
        """
        if not self._parts:
            raise ConfigError(
                "vram: every expert is on the GPUs for good; open the engine with "
                "moe_expert_cache to change how many are"
            )
        rooms = [part.room(vram_limit) for part in self._parts]
        if min(rooms) < 0:
            raise ConfigError(
                f"vram: {-min(rooms) / 2**30:.1f} GiB more are needed for what every token needs"
            )
        for part, room in zip(self._parts, rooms, strict=True):
            part.resize(room)
        return self.n_bytes

    def read_in_place(self, every: int) -> bool:
        """Have each `every`th miss of a layer read in place; whether any GPU can.  No step is in
        flight.  Blocks.  Raises: CudaError."""
        return any([part.read_in_place(every) for part in self._parts])

    def give_back(self, n_bytes: int) -> int:
        """Hold fewer experts, so that n_bytes of each GPU's memory are free; returns how many
        bytes all hold less.  No step is in flight.  Blocks.

        Raises: PinningFailed, CudaError.
        """
        before = self.n_bytes
        for part in self._parts:
            held = part.plan.n_bytes
            if held:
                part.resize(max(held - n_bytes, 0) + part.plan.fetch_bytes)
        given = before - self.n_bytes
        if given:
            self._notices.add(
                Reason.SHRUNK,
                f"the GPU's memory is full: the experts' cache gives {given / 2**20:.0f} MiB back",
            )
        return given
