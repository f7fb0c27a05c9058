"""ExpertTable: where kernels find each expert and who serves it, step by step.

Steps begin with changes of the table; what served a step's experts is known from those of the steps
up to it. It follows an `ExpertCache`, within whose compiled calls its own are: see
`ops.cpu.expert_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_table import EXPERT_TABLE
from ops.cpu.job import live, record
from ops.cpu.program import address_of, aligned
from runtime.errors import EngineBug
from runtime.experts.host_experts import LayerExperts
from runtime.experts.totals import IN_PLACE, ON_CPU, ON_GPU

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

MOST_STEPS = 8
"""In flight: a power of two."""


class ExpertTable:
    """first_rows: of each layer in the table;  most: changes of a step."""

    def __init__(
        self, layers: Sequence[LayerExperts], n_expert: int, first_rows: Sequence[int], most: int
    ) -> None:
        self._layers, self._most = layers, most
        shape = len(layers), n_expert
        self._homes = aligned((*shape, 3), np.uint64)
        self._home_kinds = aligned(shape, np.int8)
        self.ended: I8 = aligned(shape, np.int8)
        """Who served each expert in the last step that ended."""
        self._shown: I8 = np.empty((0, 0), np.int8)
        self._deltas = aligned((most, 4), np.uint64)
        self._steps = aligned((MOST_STEPS, 1 + most, 2), np.int64)
        self._first_rows, self._slots = np.array(first_rows, np.int64), aligned(0, np.uint64)
        offsets = [[matrix.offset for matrix in layer.matrices] for layer in layers]
        self._offsets = np.array(offsets, np.int64).reshape(-1, 3)
        parts: dict[str, NDArray[Any]] = {"first_rows": self._first_rows, "offsets": self._offsets}
        parts |= {"homes": self._homes, "home_kinds": self._home_kinds, "deltas": self._deltas}
        parts |= {"steps": self._steps, "ended": self.ended}
        self._record = record(
            EXPERT_TABLE,
            **{name: address_of(part) for name, part in parts.items()},
            n_expert=n_expert,
            most=most,
            steps_mask=MOST_STEPS - 1,
            slot_kind=ON_GPU,
        )
        self._state = live(self._record)
        self.address = address_of(self._record)
        """Of its record, for `ExpertCache.follow`."""

    def read_in_place(self, experts: Bools) -> None:
        """These, bool[n_layers, n_expert], are read where the host has them while they are in no
        slot, as of the changes that come from now on; others by the CPU."""
        self._home_kinds[:] = np.where(experts, IN_PLACE, ON_CPU)
        for layer, expert in np.argwhere(experts).tolist():
            matrices = self._layers[layer].matrices
            self._homes[layer, expert] = [m.host + expert * m.stride for m in matrices]

    def reset(self, slots: Sequence[int], slot_of: I32) -> None:
        """No step is in flight, and the next one finds this: the slots' addresses, and the slot
        that each expert is in."""
        self._slots = aligned(max(len(slots), 1), np.uint64)
        self._slots[: len(slots)] = slots
        self._state.slots = address_of(self._slots)
        self._state.n_begun = self._state.n_ended = 0
        self.ended[:] = np.where(slot_of >= 0, ON_GPU, self._home_kinds)
        self.show(self._shown)

    def show(self, kinds: I8) -> None:
        """Keep i8[n_layers, n_expert or more] what the last step that began finds."""
        self._shown = kinds
        self._state.shown = address_of(kinds) if kinds.size else 0
        if kinds.size:
            self._state.shown_stride = kinds.strides[0]
            kinds[:, : self.ended.shape[1]] = self.ended

    def places(self, slot_of: I32) -> U64:
        """u64[n_layers, n_expert, 3]: the addresses of every expert that is in these slots."""
        slots = self._slots[np.maximum(slot_of, 0)][..., None]
        places = slots + self._offsets[:, None].astype(np.uint64)
        return np.where(slot_of[..., None] >= 0, places, self._homes)

    def deltas(self, n: int) -> U64:
        """The changes of the table that the step brings which began last, u64[n, 4]: rows, and
        addresses.  Good until the next one begins; n: as the cache says.

        Raises: EngineBug for more steps in flight than there is room for.
        """
        if self._state.n_begun - self._state.n_ended > MOST_STEPS:
            raise EngineBug(f"more than {MOST_STEPS} steps are in flight")
        return self._deltas[:n]
