"""ExpertCache: which expert is in which slot of the GPU, step by step. Bookkeeping only.

A slot that experts are read from is overwritten only after every step that could read it has ended,
and read only after its expert has arrived. A step sees the changes that `begin_step` returned up to
it; several steps may be in flight.

    swap: change "gone" ─► begin_step ─► earlier steps end ─► swap: an upload that may start ─► copy
                                                     ─► begin_step: it has arrived, change "here"

Each of these is one compiled call for all experts that it concerns: see `ops.cpu.expert_slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_slots import (
    MOVED,
    SLOTS,
    WRONG,
    begin_step,
    end_step,
    swap_experts,
)
from ops.cpu.expert_use import call_of
from ops.cpu.job import live, record
from ops.cpu.program import address_of, aligned
from runtime.errors import EngineBug

I64 = NDArray[np.int64]

NO_SLOT = NO_VICTIM = -1
Expert = tuple[int, int]
"""(MoE layer, expert)."""
FEWEST_ROWS = 64


@dataclass(frozen=True)
class LayerShape:
    """n_expert experts whose slots are of size class `size_class`."""

    n_expert: int
    size_class: int


class Upload(NamedTuple):
    """An expert on its way into a slot."""

    layer: int
    expert: int
    slot: int


class Rows:
    """Room for i64[room, 2], of which n rows count, for compiled calls. They name an expert by its
    cell: layer * n_expert + expert, where n_expert is the most that a layer has.
    """

    __slots__ = ("_rows", "address", "n", "room")

    def __init__(self, room: int) -> None:
        self._rows: I64 = aligned((room, 2), np.int64)
        self.address, self.n, self.room = address_of(self._rows), 0, room

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]] | I64) -> Rows:
        made = cls(len(rows))
        made.set(rows)
        return made

    @property
    def values(self) -> I64:
        """Those that count."""
        return self._rows[: self.n]

    def set(self, rows: Sequence[Sequence[int]] | I64) -> None:
        """These count, for which there is room."""
        self.n = len(rows)
        self._rows[: self.n] = np.reshape(rows, (-1, 2))

    def __len__(self) -> int:
        return self.n


NO_ROWS = Rows(0)
"""None."""


class ExpertCache:
    """layers: of each MoE layer; slot_classes: the size class of each slot.

    Rows that a call returns are good until the next call.
    """

    def __init__(self, layers: Sequence[LayerShape], slot_classes: Sequence[int]) -> None:
        self.layers = tuple(layers)
        shape = len(layers), max((layer.n_expert for layer in layers), default=0)
        self.slot_of: NDArray[np.int32] = aligned(shape, np.int32)
        """Where steps from the next one on find each expert."""
        self.coming: NDArray[np.bool_] = aligned(shape, np.bool_)
        """Experts that have a slot but are not there yet."""
        sizes = [layer.size_class for layer in layers]
        self._numbers = {size: number for number, size in enumerate(dict.fromkeys(sizes))}
        self.class_of: NDArray[np.int32] = aligned(self.slot_of.size, np.int32)
        """The class of each cell's slots: their size classes, numbered from 0."""
        self.class_of[:] = np.repeat([self._numbers[size] for size in sizes], shape[1])
        self.n_free: I64 = aligned(max(len(self._numbers), 1), np.int64)
        """Slots of each of these that nothing was ever assigned to, or that were given back."""
        self._record = record(SLOTS)
        self._state = live(self._record)
        self._begin, self._end, self._swap = (
            call_of(kernel, self._record) for kernel in (begin_step, end_step, swap_experts)
        )
        self._followers = {"table": 0, "copies": 0}
        self._offer(slot_classes)

    def _offer(self, slot_classes: Sequence[int]) -> None:
        """All slots are free, no expert is in one, and no change is waiting."""
        self.slot_of[:] = NO_SLOT
        self.coming[:] = False
        self.n_slots = n_slots = len(slot_classes)
        free: list[list[int]] = [[] for _ in self.n_free]
        for slot in reversed(range(n_slots)):
            free[self._numbers[slot_classes[slot]]].append(slot)
        self.n_free[:] = [len(slots) for slots in free]
        self._free = aligned((len(free), max(n_slots, 1)), np.int64)
        for row, slots in zip(self._free, free, strict=True):
            row[: len(slots)] = slots
        # A slot's expert leaves, and the next one comes only after that was seen; and `moved`.
        most_changes = 2 * n_slots + self.slot_of.size
        n_changes, n_waiting = (1 << n.bit_length() for n in (most_changes, n_slots))
        self._changes, self._waiting = (
            aligned((n_changes, 2), np.int64),
            aligned((n_waiting, 3), np.int64),
        )
        self._record.fill(0)
        parts = {
            "slots": self.slot_of,
            "coming": self.coming,
            "classes": self.class_of,
            "free": self._free,
            "n_free": self.n_free,
            "changes": self._changes,
            "waiting": self._waiting,
        }
        for name, part in parts.items():
            self._record[name] = address_of(part)
        for name, address in self._followers.items():
            self._record[name] = address
        self._record["n_slots"] = self._free.shape[1]
        self._record["changes_mask"], self._record["waiting_mask"] = n_changes - 1, n_waiting - 1
        self._room_for(FEWEST_ROWS)

    def _room_for(self, most: int) -> None:
        """Return so many rows at a time."""
        self._rows = Rows(most)
        self._state.rows = self._rows.address

    def refill(self, slot_classes: Sequence[int], best: Iterable[Expert]) -> list[Upload]:
        """Other slots instead of these: who goes where, the best first, as far as there are slots.

        What is copied there before the next step counts as there; changes that no step has seen
        are forgotten, so the table is written anew.
        Raises: EngineBug while a step is in flight, or an upload under way.
        """
        if self.n_begun != self._state.n_ended or self._state.n_loading:
            raise EngineBug("the slots of experts were changed while a step or an upload runs")
        self._offer(slot_classes)
        uploads = (self.fill(layer, expert) for layer, expert in best)
        return [upload for upload in uploads if upload is not None]

    @property
    def n_begun(self) -> int:
        """Steps, since the slots are those that they are."""
        return int(self._state.n_begun)

    @property
    def resident(self) -> NDArray[np.bool_]:
        """bool[n_layers, n_expert]: experts that steps from the next one on find in a slot."""
        resident: NDArray[np.bool_] = self.slot_of != NO_SLOT
        return resident

    def fill(self, layer: int, expert: int) -> Upload | None:
        """Assign a free slot before the first step: what is copied into it then counts as there.

        None: the layer's size class has no free slot.
        """
        number = self._numbers[self.layers[layer].size_class]
        if self.n_begun or not self.n_free[number] or self.slot_of[layer, expert] != NO_SLOT:
            return None
        self.n_free[number] -= 1
        slot = self.slot_of[layer, expert] = self._free[number, self.n_free[number]]
        return Upload(layer, expert, int(slot))

    def unfill(self, upload: Upload) -> None:
        """What `fill` has assigned is not there: the slot is free again, before the first step."""
        number = self._numbers[self.layers[upload.layer].size_class]
        self.slot_of[upload.layer, upload.expert] = NO_SLOT
        self._free[number, self.n_free[number]] = upload.slot
        self.n_free[number] += 1

    def follow(self, table: int, copies: int) -> None:
        """Have a table follow steps, and copies be written of the uploads that start: the addresses
        of their records, see `ops.cpu.expert_table`, which outlive the cache."""
        self._followers = {"table": table, "copies": copies}
        self._state.table, self._state.copies = table, copies

    def begin_step(self, arrived: Rows, most: int) -> Rows:
        """The experts of uploads that have arrived are in their slots, and a step begins: up to
        `most` changes, in order, that it sees first. They are the slot from which each row's expert
        is read from then on; NO_SLOT: it is in none."""
        return self._done(self._begin, arrived, most)

    def moved(self, cells: Iterable[int]) -> None:
        """Where kernels find these experts while they are in no slot has changed, once for each:
        steps are told."""
        state = self._state
        for cell in cells:
            self._changes[state.n_changed & state.changes_mask] = cell, MOVED
            state.n_changed += 1

    def end_step(self) -> None:
        """The earliest step that has not ended has ended."""
        self._end()

    def swap(self, swaps: Rows, most: int) -> Rows:
        """Give each row's expert a slot: that of the row's other expert, which leaves with the next
        step, or where that is `NO_VICTIM`, a free one.  Returns up to `most` uploads whose slots
        nothing reads any more, each row an expert and its slot: whoever asks starts them.

        Raises: EngineBug for an expert that has a slot, one that is to leave and has none, or one
        whose slots have another size; or if there is no free slot.
        """
        uploads = self._done(self._swap, swaps, most)
        if self._state.error:
            raise EngineBug(f"an expert of the cache {WRONG[self._state.error]}")
        return uploads

    @property
    def n_pending(self) -> int:
        """Uploads that wait or are under way."""
        state = self._state
        return int(state.n_waiting - state.n_started + state.n_loading)

    def _done(self, call: Callable[[], object], given: Rows, most: int) -> Rows:
        """What a call makes of rows: up to `most` others."""
        state = self._state
        if most > self._rows.room:
            self._room_for(most)
        state.given, state.n_given, state.most = given.address, given.n, most
        call()
        self._rows.n = state.n_rows
        return self._rows
