"""Uploader: copies experts into slots of the GPU on a stream of its own, beside the steps.

One expert is three copies and an event. Python starts them while a step runs and looks at the
events before the next: nothing waits, and no step's stream has a copy in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from runtime.cuda.device import Device
from runtime.cuda.stream import Event, Stream
from runtime.experts.cache import Upload
from runtime.experts.host_experts import LayerExperts


class Uploader:
    """layers: pinned experts; slot_address: of a slot by number; most: uploads under way."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[LayerExperts],
        slot_address: Callable[[int], int],
        most: int,
    ) -> None:
        """Raises: CudaError."""
        self._layers, self._slot_address = layers, slot_address
        with ExitStack() as resources:
            self._stream = resources.enter_context(Stream(device, "uploads"))
            self._events = [resources.enter_context(Event(device, "upload")) for _ in range(most)]
            self._resources = resources.pop_all()
        self._flying: deque[tuple[Upload, Event]] = deque()

    @property
    def room(self) -> int:
        """Uploads that may be started now."""
        return len(self._events)

    def start(self, upload: Upload) -> None:
        """Enqueue the copies; at most `room` times.  Raises: CudaError, DeviceLost."""
        event = self._events.pop()
        target = self._slot_address(upload.slot)
        for matrix in self._layers[upload.layer].matrices:
            source = matrix.host + upload.expert * matrix.stride
            self._stream.upload(target + matrix.offset, source, matrix.n_bytes)
        self._stream.record(event)
        self._flying.append((upload, event))

    def arrived(self) -> list[Upload]:
        """Uploads that have ended since the last call.  Raises: DeviceLost, CudaError."""
        ended = []
        while self._flying and self._flying[0][1].passed():
            upload, event = self._flying.popleft()
            self._events.append(event)
            ended.append(upload)
        return ended

    def close(self) -> None:
        """Wait for the copies, a fraction of a millisecond each, and give everything back.

        Raises: CudaError.
        """
        if self._flying:
            self._stream.device.call("cuStreamSynchronize", self._stream.handle)
        self._flying.clear()
        self._resources.close()
