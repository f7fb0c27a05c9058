"""Uploader: copies experts into slots of the GPU on a stream of its own, beside the steps.

What sets out in a step travels together: one driver call for all copies, and an event behind them.
Python starts them while a step runs and looks at the event before the next: nothing waits, and no
step's stream has a copy in it. Experts that are not pinned come by way of `Staging`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from runtime.cuda.device import Device
from runtime.cuda.stream import Copy, Event, Stream
from runtime.experts.cache import Upload
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.link_meter import LinkMeter
from runtime.experts.staging import Staging

STAGING_BUFFERS = 4
BATCHES = 4
"""Under way at the same time: a step starts one, and they take less time than steps."""
NEWEST_SHARE = 0.2
"""Of the latest measurement in the time of an upload."""
SETTLE_SECONDS = 1e-3


class _Batch(NamedTuple):
    """Uploads that travel together, and the staging buffers that they come from."""

    uploads: list[Upload]
    buffers: list[int]
    event: Event


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
        self._host, self._slot_address, self._most = host, slot_address, most
        with ExitStack() as resources:
            self._stream = resources.enter_context(Stream(device, "uploads"))
            self._events = [
                resources.enter_context(Event(device, "uploads", timed=True))
                for _ in range(min(most, BATCHES))
            ]
            self._began = resources.enter_context(Event(device, "first upload", timed=True))
            self._slot_bytes = [layer.slot_bytes for layer in host.layers]
            n_buffers = min(most, STAGING_BUFFERS)
            self._staging = Staging(device, max(self._slot_bytes, default=0), n_buffers)
            resources.callback(self._staging.close)
            self._resources = resources.pop_all()
        self._flying: deque[_Batch] = deque()
        self._n_flying = 0
        self._staged: set[Upload] = set()
        self._n_arrived = 0  # since `_began`
        self.meter = LinkMeter(device.info.index)
        self.seconds = 0.0
        """What an upload takes the link; 0: not known yet."""

    @property
    def room(self) -> int:
        """Uploads that may be started now."""
        if not self._events:
            return 0
        room = self._most - self._n_flying - len(self._staged)
        return room if self._host.pins_all else min(room, self._staging.room)

    def start(self, uploads: Sequence[Upload]) -> None:
        """Enqueue the copies of these experts, at most `room` of them, and of those that were read
        meanwhile; what is not pinned is read first.

        Raises: CudaError, DeviceLost.
        """
        together: list[Upload] = []
        buffers: list[int] = []
        copies: list[Copy] = []
        if self._staged and self._events:
            for upload, buffer in self._staging.read():
                self._staged.remove(upload)
                n_bytes, target = self._slot_bytes[upload.layer], self._slot_address(upload.slot)
                copies.append((target, self._staging.address(buffer), n_bytes))
                together.append(upload)
                buffers.append(buffer)
        host = self._host
        all_pinned = host.pinned
        for upload in uploads:
            layer, expert, slot = upload
            if not (all_pinned or host.is_pinned(layer, expert)):
                self._staged.add(upload)
                self._staging.start(upload, host.parts(layer, expert))
                continue
            target = self._slot_address(slot)
            for offset, source, n_bytes in host.copies(layer, expert):
                copies.append((target + offset, source, n_bytes))
            together.append(upload)
        if together:
            self._begin()
            self._stream.upload_all(copies)
            event = self._events.pop()
            self._stream.record(event)
            self._flying.append(_Batch(together, buffers, event))
            self._n_flying += len(together)

    def _begin(self) -> None:
        """Before the copies of a batch: nothing may be under way."""
        if not self._flying:
            self._stream.record(self._began)
            self.meter.begins()
            self._n_arrived = 0

    def arrived(self) -> list[Upload]:
        """Uploads that have ended since the last call.  Raises: DeviceLost, CudaError."""
        ended: list[Upload] = []
        last: Event | None = None
        while self._flying and self._flying[0].event.passed():
            uploads, buffers, last = self._flying.popleft()
            self._events.append(last)
            for buffer in buffers:
                self._staging.give(buffer)
            ended += uploads
        if last is not None:
            self._n_flying -= len(ended)
            self._n_arrived += len(ended)
            self._measure(last, sum(self._slot_bytes[upload.layer] for upload in ended))
        return ended

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
            self.start(())
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
