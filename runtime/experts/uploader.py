"""Uploader: copies experts into slots of the GPU on a stream of its own, beside the steps.

One expert is a few copies and an event. Python starts them while a step runs and looks at the
events before the next: nothing waits, and no step's stream has a copy in it. Experts that are not
pinned come by way of `Staging`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from runtime.cuda.device import Device
from runtime.cuda.stream import Event, Stream
from runtime.experts.cache import Upload
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.link_meter import LinkMeter
from runtime.experts.staging import Staging

STAGING_BUFFERS = 4
NEWEST_SHARE = 0.2
"""Of the latest measurement in the time of an upload."""
SETTLE_SECONDS = 1e-3


class Uploader:
    """host: where they are; slot_address: of a slot by number; most: uploads under way."""

    def __init__(
        self,
        device: Device,
        host: HostExperts | HostPart,
        slot_address: Callable[[int], int],
        most: int,
    ) -> None:
        """Raises: CudaError."""
        self._host, self._slot_address = host, slot_address
        with ExitStack() as resources:
            self._stream = resources.enter_context(Stream(device, "uploads"))
            self._events = [
                resources.enter_context(Event(device, "upload", timed=True)) for _ in range(most)
            ]
            self._began = resources.enter_context(Event(device, "first upload", timed=True))
            sizes = [layer.slot_bytes for layer in host.layers]
            n_buffers = min(most, STAGING_BUFFERS)
            self._staging = Staging(device, max(sizes, default=0), n_buffers)
            resources.callback(self._staging.close)
            self._resources = resources.pop_all()
        self._flying: deque[tuple[Upload, Event, int | None]] = deque()
        self._staged: dict[Upload, Event] = {}
        self._n_arrived = 0  # since `_began`
        self.meter = LinkMeter(device.info.index)
        self.seconds = 0.0
        """What an upload takes the link; 0: not known yet."""

    @property
    def room(self) -> int:
        """Uploads that may be started now."""
        n_events = len(self._events)
        return n_events if self._host.pins_all else min(n_events, self._staging.room)

    def start(self, upload: Upload) -> None:
        """Enqueue the expert's copies, or have it read first; at most `room` times.

        Raises: CudaError, DeviceLost.
        """
        event, layer, expert = self._events.pop(), upload.layer, upload.expert
        if not self._host.is_pinned(layer, expert):
            self._staged[upload] = event
            self._staging.start(upload, self._host.parts(layer, expert))
            return
        self._begin()
        target = self._slot_address(upload.slot)
        for offset, source, n_bytes in self._host.copies(layer, expert):
            self._stream.upload(target + offset, source, n_bytes)
        self._stream.record(event)
        self._flying.append((upload, event, None))

    def forward(self) -> None:
        """Enqueue copies of experts that were read meanwhile.  Raises: CudaError, DeviceLost."""
        for upload, buffer in self._staging.read():
            self._begin()
            event = self._staged.pop(upload)
            n_bytes = self._host.layers[upload.layer].slot_bytes
            target = self._slot_address(upload.slot)
            self._stream.upload(target, self._staging.address(buffer), n_bytes)
            self._stream.record(event)
            self._flying.append((upload, event, buffer))

    def arrived(self) -> list[Upload]:
        """Uploads that have ended since the last call.  Raises: DeviceLost, CudaError."""
        ended = []
        n_bytes = 0
        last: Event | None = None
        while self._flying and self._flying[0][1].passed():
            upload, event, buffer = self._flying.popleft()
            self._events.append(event)
            if buffer is not None:
                self._staging.give(buffer)
            self._n_arrived += 1
            n_bytes += self._host.layers[upload.layer].slot_bytes
            last = event
            ended.append(upload)
        if last is not None:
            self._measure(last, n_bytes)
        return ended

    def _begin(self) -> None:
        """Before the first copy of an upload: nothing may be under way."""
        if not self._flying:
            self._stream.record(self._began)
            self.meter.begins()
            self._n_arrived = 0

    def _measure(self, last: Event, n_bytes: int) -> None:
        """All uploads since `_began` have arrived up to `last`, one behind the other, n_bytes of
        them just now."""
        whole = 1e-3 * last.milliseconds_since(self._began)
        self.meter.ended(whole, n_bytes)
        seconds = whole / self._n_arrived
        share = NEWEST_SHARE if self.seconds else 1.0
        self.seconds += share * (seconds - self.seconds)

    def settle(self) -> list[Upload]:
        """Wait until nothing is under way; the uploads that have ended since `arrived`.

        Blocks for as long as a disk takes.  Raises: DeviceLost, CudaError.
        """
        ended = self.arrived()
        while self._flying or (self._staged and self._staging.failure is None):
            time.sleep(SETTLE_SECONDS)
            self.forward()
            ended += self.arrived()
        return ended

    def close(self) -> None:
        """Wait for the copies, a fraction of a millisecond each, and give everything back.

        Raises: CudaError.
        """
        if self._flying:
            self._stream.device.call("cuStreamSynchronize", self._stream.handle)
        self._flying.clear()
        self._resources.close()
