"""GPUStates: the memory of sequences' recurrent states on a GPU, each one slot for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.cuda.stream import Stream
from runtime.engine.gpu.weights import PLANNED_ADDRESS
from runtime.errors import ConfigError
from runtime.models.spec import ModelSpec

ALIGNMENT = 256
"""Bytes: where the layers' parts of a slot begin."""

MAX_SNAPSHOTS = 32
MIN_SNAPSHOTS = 2
SNAPSHOT_SHARE = 8
"""All snapshots together take up to this part of the memory that is free."""


class StateSizes:
    """Where the layers' parts of a slot lie."""

    def __init__(self, spec: ModelSpec) -> None:
        self.offsets: list[int] = []
        self.slot_bytes = 0
        for layer in spec.layers:
            self.offsets.append(self.slot_bytes)
            self.slot_bytes += -(-layer.state_bytes // ALIGNMENT) * ALIGNMENT

    def slots(self, max_sequences: int, n_snapshots: int | None, free_bytes: int) -> int:
        """Slots of an executor: the running sequences', and snapshots to begin others from.

        n_snapshots  None: what `free_bytes` of the GPU's memory suggest
        Raises: ConfigError where they do not fit.
        """
        if self.slot_bytes == 0:
            return 0
        if n_snapshots is None:
            share = max(free_bytes, 0) // SNAPSHOT_SHARE // self.slot_bytes
            n_snapshots = min(MAX_SNAPSHOTS, max(share, MIN_SNAPSHOTS))
        n_slots = max_sequences + n_snapshots
        if n_slots * self.slot_bytes > free_bytes:
            raise ConfigError(
                f"n_parallel = {max_sequences} and {n_snapshots} snapshots take "
                f"{n_slots * self.slot_bytes / 2**30:.1f} GiB of recurrent states, and "
                f"{max(free_bytes, 0) / 2**30:.1f} GiB of the GPU's memory is free"
            )
        return n_slots


class GPUStates:
    """Where the states of one executor lie, if they begin at `base`."""

    def __init__(self, sizes: StateSizes, n_slots: int, base: int = PLANNED_ADDRESS) -> None:
        self.sizes, self.n_slots = sizes, n_slots
        self.n_bytes = n_slots * sizes.slot_bytes
        self._base = base

    @property
    def slot_bytes(self) -> int:
        return self.sizes.slot_bytes

    def address(self, layer: int) -> int:
        """Of what `layer` keeps in slot 0; the same of the next slot is `slot_bytes` later."""
        return self._base + self.sizes.offsets[layer]


class StateMemory(GPUStates):
    """States of one executor.  Moving them is for the time between steps."""

    def __init__(self, device: Device, sizes: StateSizes, n_slots: int) -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        n_bytes = max(n_slots * sizes.slot_bytes, 1)
        self._buffer = DeviceBuffer(device, n_bytes, "recurrent states")
        super().__init__(sizes, n_slots, self._buffer.address)

    def copy(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        """Put copies of whole states into the stream, in order."""
        for source, target in copies:
            if source != target:
                stream.copy(self._slot(target), self._slot(source), self.slot_bytes)

    def save(self, slot: int, stream: Stream) -> bytes:
        """The bytes of a state.  Blocks: not on a thread that runs a loop."""
        with PinnedBuffer(self._buffer.device, max(self.slot_bytes, 1), "state image") as image:
            stream.download(image.host, self._slot(slot), self.slot_bytes)
            stream.synchronize()
            return image.view[: self.slot_bytes].tobytes()

    def load(self, slot: int, image: bytes, stream: Stream) -> None:
        """Put back what `save` returned.  Blocks, as `save`.

        Raises: ValueError when the image is not of one state.
        """
        if len(image) != self.slot_bytes:
            raise ValueError(f"an image of {len(image)} bytes is not a state of {self.slot_bytes}")
        with PinnedBuffer(self._buffer.device, max(len(image), 1), "state image") as pinned:
            pinned.view[: len(image)] = np.frombuffer(image, np.uint8)
            stream.upload(self._slot(slot), pinned.host, len(image))
            stream.synchronize()

    def describe(self) -> dict[str, object]:
        """Facts for /props and the console."""
        return {
            "state_bytes": self.n_bytes,
            "state_slot_bytes": self.slot_bytes,
            "state_slots": self.n_slots,
        }

    def close(self) -> None:
        self._buffer.close()

    def _slot(self, slot: int) -> int:
        return self._buffer.address + slot * self.slot_bytes
