"""StateSlots: the memory of sequences' recurrent states, each one row of bytes for all layers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ops.cpu.program import LINE, address_of, aligned
from runtime.engine.kv_pages import available_bytes
from runtime.errors import ConfigError
from runtime.models.spec import ModelSpec

MAX_SNAPSHOTS = 32
SNAPSHOT_SHARE = 8  # all snapshots together take up to this part of the memory that is available


class StateSlots:
    """States of one executor; the memory is touched, and so taken, only as states are written."""

    def __init__(self, spec: ModelSpec, n_slots: int) -> None:
        offset = 0
        self._offsets: list[int] = []
        for layer in spec.layers:
            self._offsets.append(offset)
            offset += -(-layer.state_bytes // LINE) * LINE
        self.slot_bytes = offset
        self._memory = aligned((n_slots, offset), np.uint8)

    @property
    def n_bytes(self) -> int:
        return self._memory.nbytes

    def address(self, layer: int) -> int:
        """Of what `layer` keeps in slot 0; the same of the next slot is `slot_bytes` later."""
        return address_of(self._memory) + self._offsets[layer]

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole states, in order."""
        for source, target in copies:
            self._memory[target] = self._memory[source]

    def save(self, slot: int) -> bytes:
        return bytes(self._memory[slot].data)

    def load(self, slot: int, image: bytes) -> None:
        """Put back what `save` returned.

        Raises: ValueError when the image is not of one state.
        """
        if len(image) != self.slot_bytes:
            raise ValueError(f"an image of {len(image)} bytes is not a state of {self.slot_bytes}")
        self._memory[slot] = np.frombuffer(image, np.uint8)


def state_slots_for(state_bytes: int, max_sequences: int, n_snapshots: int | None) -> int:
    """Slots of an executor: the running sequences', and snapshots to begin others from.

    Raises: ConfigError where they do not fit the memory that is available now.
    """
    available = available_bytes()
    n_slots = n_state_slots(state_bytes, max_sequences, n_snapshots, available)
    if available is not None and n_slots * state_bytes > available:
        raise ConfigError(
            f"n_parallel = {max_sequences} and {n_slots - max_sequences} snapshots take "
            f"{n_slots * state_bytes / 2**30:.1f} GiB of recurrent states, and "
            f"{available / 2**30:.1f} GiB of memory is available"
        )
    return n_slots


def n_state_slots(
    state_bytes: int, max_sequences: int, n_snapshots: int | None, available: int | None
) -> int:
    """The same where so much memory is available (None: unknown), whether it fits or not."""
    if state_bytes == 0:
        return 0
    if n_snapshots is None:
        share = (available or 0) // SNAPSHOT_SHARE // state_bytes
        n_snapshots = min(MAX_SNAPSHOTS, max(share, 2))
    return max_sequences + n_snapshots
