"""ExpertCache: which expert is in which slot of the GPU, step by step. Bookkeeping only.

A slot that experts are read from is overwritten only after every step that could read it has ended,
and read only after its expert has arrived. A step sees the changes that `begin_step` returned up to
it; several steps may be in flight.

    replace ─► change "gone" ─► begin_step ─► earlier steps end ─► startable ─► copy ─► arrived
                                                        ─► change "here" ─► begin_step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import EngineBug

NO_SLOT = -1
Expert = tuple[int, int]
"""(MoE layer, expert)."""


@dataclass(frozen=True)
class LayerShape:
    """n_expert experts whose slots are of size class `size_class`."""

    n_expert: int
    size_class: int


class Change(NamedTuple):
    """From a step on the expert is read from the slot; NO_SLOT: it is in none."""

    layer: int
    expert: int
    slot: int


class Upload(NamedTuple):
    """An expert on its way into a slot."""

    layer: int
    expert: int
    slot: int


@dataclass(slots=True)
class _Waiting:
    """An upload whose slot may still be read by steps up to `last_reader`; None: it will be by
    those that begin before the change is published."""

    upload: Upload
    last_reader: int | None


class ExpertCache:
    """layers: of each MoE layer; slot_classes: the size class of each slot."""

    def __init__(self, layers: Sequence[LayerShape], slot_classes: Sequence[int]) -> None:
        self.layers = tuple(layers)
        n_expert = max((layer.n_expert for layer in layers), default=0)
        self.slot_of: NDArray[np.int32] = np.full((len(layers), n_expert), NO_SLOT, np.int32)
        """Where steps from the next one on find each expert."""
        self.coming: NDArray[np.bool_] = np.zeros((len(layers), n_expert), np.bool_)
        """Experts that have a slot but are not there yet."""
        self.layer_classes = np.array([layer.size_class for layer in layers], np.int64)
        self._classes = [layer.size_class for layer in layers]
        self._free: dict[int, list[int]] = {}
        self._offer(slot_classes)
        self.n_slots = len(slot_classes)
        self._changes: deque[Change] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._unseen: deque[_Waiting] = deque()  # those whose change no step has seen
        self._loading: set[Upload] = set()
        self.n_begun = 0
        """Steps, since the start."""
        self.n_ended = 0

    def _offer(self, slot_classes: Sequence[int]) -> None:
        """All slots are free."""
        self._free.clear()
        for slot in reversed(range(len(slot_classes))):
            self._free.setdefault(slot_classes[slot], []).append(slot)

    def refill(self, slot_classes: Sequence[int], best: Iterable[Expert]) -> list[Upload]:
        """Other slots instead of these: who goes where, the best first, as far as there are slots.

        What is copied there before the next step counts as there; changes that no step has seen
        are forgotten, so the table is written anew.
        Raises: EngineBug while a step is in flight, or an upload under way.
        """
        if self.n_begun != self.n_ended or self._loading:
            raise EngineBug("the slots of experts were changed while a step or an upload runs")
        self.slot_of[:] = NO_SLOT
        self.coming[:] = False
        self._changes.clear()
        self._waiting.clear()
        self._unseen.clear()
        self._offer(slot_classes)
        self.n_slots = len(slot_classes)
        uploads = []
        for layer, expert in best:
            free = self._free.get(self.layers[layer].size_class)
            if free:
                slot = self.slot_of[layer, expert] = free.pop()
                uploads.append(Upload(layer, expert, int(slot)))
        return uploads

    @property
    def resident(self) -> NDArray[np.bool_]:
        """bool[n_layers, n_expert]: experts that steps from the next one on find in a slot."""
        resident: NDArray[np.bool_] = self.slot_of != NO_SLOT
        return resident

    def n_free(self, size_class: int) -> int:
        """Slots of the class that nothing was ever assigned to, or that were given back."""
        return len(self._free.get(size_class, ()))

    def fill(self, layer: int, expert: int) -> Upload | None:
        """Assign a free slot before the first step: what is copied into it then counts as there.

        None: the layer's size class has no free slot.
        """
        self._check_absent(layer, expert)
        free = self._free.get(self.layers[layer].size_class)
        if self.n_begun or not free:
            return None
        slot = free.pop()
        self.slot_of[layer, expert] = slot
        return Upload(layer, expert, slot)

    def unfill(self, upload: Upload) -> None:
        """What `fill` has assigned is not there: the slot is free again, before the first step."""
        self.slot_of[upload.layer, upload.expert] = NO_SLOT
        self._free[self.layers[upload.layer].size_class].append(upload.slot)

    def replace(self, layer: int, expert: int, victim: Expert | None) -> None:
        """Give the expert a slot: a free one, or that of `victim`, which leaves with the next step.

        Raises: EngineBug for an expert that has a slot, a victim that has none, or one whose slots
        have another size; or if there is no free slot.
        """
        self._check_absent(layer, expert)
        size_class = self._classes[layer]
        if victim is None:
            if not self._free.get(size_class):
                raise EngineBug("no free slot is left for an expert")
            upload = Upload(layer, expert, self._free[size_class].pop())
            self._waiting.append(_Waiting(upload, 0))
        else:
            slot: int = self.slot_of.item(*victim)
            if slot == NO_SLOT or self._classes[victim[0]] != size_class:
                raise EngineBug(f"expert {victim} cannot make room for {(layer, expert)}")
            self.slot_of[victim] = NO_SLOT
            self._changes.append(Change(*victim, NO_SLOT))
            waiting = _Waiting(Upload(layer, expert, slot), None)
            self._waiting.append(waiting)
            self._unseen.append(waiting)
        self.coming[layer, expert] = True

    def begin_step(self, most: int) -> list[Change]:
        """Up to `most` changes, in order, that the step which begins now sees first."""
        waiting = self._changes
        changes = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        for change in changes:
            if change.slot == NO_SLOT:  # in the order of the uploads that are to have the slots
                self._unseen.popleft().last_reader = self.n_begun
        self.n_begun += 1
        return changes

    def end_step(self) -> None:
        """The earliest step that has not ended has ended."""
        self.n_ended += 1

    def startable(self, most: int) -> list[Upload]:
        """Up to `most` uploads whose slots nothing reads any more: whoever asks starts them."""
        started: list[Upload] = []
        while self._waiting and len(started) < most:
            first = self._waiting[0]
            if first.last_reader is None or self.n_ended < first.last_reader:
                break
            started.append(self._waiting.popleft().upload)
        self._loading.update(started)
        return started

    def arrived(self, upload: Upload) -> None:
        """The expert is in its slot: the next step may read it."""
        self._loading.remove(upload)
        self.coming[upload.layer, upload.expert] = False
        self.slot_of[upload.layer, upload.expert] = upload.slot
        self._changes.append(Change(upload.layer, upload.expert, upload.slot))

    @property
    def n_pending(self) -> int:
        """Uploads that wait or are under way."""
        return len(self._waiting) + len(self._loading)

    def _check_absent(self, layer: int, expert: int) -> None:
        if self.slot_of.item(layer, expert) != NO_SLOT or self.coming.item(layer, expert):
            raise EngineBug(f"expert {expert} of MoE layer {layer} has a slot already")
