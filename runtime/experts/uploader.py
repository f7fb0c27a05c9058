"""Uploader: copies experts into slots of the GPU on a stream of its own, beside the steps.

What sets out in a step travels together: one driver call for all copies, and an event behind them.
Python starts them while a step runs and looks at the event before the next: nothing waits, and no
step's stream has a copy in it. Experts that are not pinned come by way of `Staging`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from runtime.cuda.device import Device
from runtime.cuda.stream import Event, Stream
from runtime.experts.cache import NO_ROWS, Rows, Upload
from runtime.experts.expert_copies import ExpertCopies
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.link_meter import LinkMeter
from runtime.experts.staging import Staging

STAGING_BUFFERS = 4
BATCHES = 4
"""Under way at the same time: a step starts one, and they take less time than steps."""
MEASURE_EVERY = 8
"""Times that copies begin: it takes the host as long as starting them."""
NEWEST_SHARE = 0.2
"""Of the latest measurement in the time of an upload."""
SETTLE_SECONDS = 1e-3


@dataclass(eq=False, slots=True)
class _Batch:
    """Uploads that travel together, their bytes, and the staging buffers that some come from."""

    event: Event
    uploads: Rows
    n_bytes: int = 0
    buffers: list[int] = field(default_factory=list)


class Uploader:
    """host: where they are, n_expert of a layer at most; most: uploads under way.

    Uploads are rows of experts and slots, as those of `ExpertCache`.
    """

    def __init__(
        self,
        device: Device,
        host: HostExperts | HostPart,
        n_expert: int,
        most: int,
        tell: Callable[[str], object],
    ) -> None:
        """tell: as of `CopyBatch`.  Raises: CudaError."""
        self._host, self._n_expert, self._most = host, n_expert, most
        with ExitStack() as resources:
            self._stream = resources.enter_context(Stream(device, "uploads"))
            self._idle = [
                _Batch(resources.enter_context(Event(device, "uploads", timed=True)), Rows(most))
                for _ in range(min(most, BATCHES))
            ]
            self._began = resources.enter_context(Event(device, "first upload", timed=True))
            self._slot_bytes = [layer.slot_bytes for layer in host.layers]
            n_buffers = min(most, STAGING_BUFFERS)
            self._staging = Staging(device, max(self._slot_bytes, default=0), n_buffers)
            resources.callback(self._staging.close)
            self.copies = ExpertCopies(self._stream, host.layers, n_expert, most, tell)
            """Of the uploads that the cache starts, which it writes itself."""
            self._resources = resources.pop_all()
        self._flying: deque[_Batch] = deque()
        self._n_flying = 0
        self._staged: set[Upload] = set()
        self._n_begun = 0  # times that copies began while none was under way
        self._is_measured = False  # since the last one of them, which was at `_began`
        self._n_arrived = 0  # since then
        self.meter = LinkMeter(device.info.index)
        self.seconds = 0.0
        """What an upload takes the link; 0: not known yet."""

    def room(self, *, pinned: bool) -> int:
        """Uploads that may be started now; pinned: all are or soon will be."""
        if not self._idle:
            return 0
        self.copies.ready(self._idle[-1].uploads)
        room = self._most - self._n_flying - len(self._staged)
        return room if pinned else min(room, self._staging.room)

    def start(self, uploads: Rows) -> int:
        """Enqueue the copies of these experts, which the cache has just started, at most `room` of
        them, and of those that were read meanwhile; what is not pinned is read first.  The bytes of
        those that have set out.

        Raises: DeviceLost, CudaError.
        """
        written, n = self.copies.state, uploads.n
        if self._staged or (n and written.n_others):
            return self._start_some(uploads)
        if n:
            self._set_out(n, written.n_copies, written.n_bytes)
            return int(written.n_bytes)
        return 0

    def _start_some(self, uploads: Rows) -> int:
        """The same where not all are whole in the memory that the driver knows."""
        copies = self.copies
        n_copies = copies.state.n_copies if uploads.n else 0
        n_bytes = copies.state.n_bytes if uploads.n else 0
        others = copies.others[: copies.state.n_others if uploads.n else 0].tolist()
        given = uploads.values.tolist()
        rows = [row for at, row in enumerate(given) if at not in others]
        for at in others:
            n_copies, size = self._start_other(given[at], rows, n_copies)
            n_bytes += size
        buffers: list[int] = []
        for upload, buffer in self._staging.read() if self._staged and self._idle else ():
            self._staged.remove(upload)
            size = self._slot_bytes[upload.layer]
            source, target = self._staging.address(buffer), copies.slots.item(upload.slot)
            n_copies = copies.batch.add(n_copies, [(target, source, size)])
            n_bytes += size
            rows.append([upload.layer * self._n_expert + upload.expert, upload.slot])
            buffers.append(buffer)
        if rows:
            self._idle[-1].uploads.set(rows)
            self._idle[-1].buffers = buffers
            self._set_out(len(rows), n_copies, n_bytes)
        return n_bytes

    def _start_other(self, row: list[int], rows: list[list[int]], n_copies: int) -> tuple[int, int]:
        """Begin to read an expert that is not pinned, or write its copies behind n_copies, and it
        to the rows that set out; how many copies there are then, and its bytes that set out."""
        (layer, expert), slot = divmod(row[0], self._n_expert), row[1]
        if not self._host.is_pinned(layer, expert):
            upload = Upload(layer, expert, slot)
            self._staged.add(upload)
            self._staging.start(upload, self._host.parts(layer, expert))
            return n_copies, 0
        target, parts = self.copies.slots.item(slot), self._host.copies(layer, expert)
        rows.append(row)
        copies = [(target + offset, source, n_bytes) for offset, source, n_bytes in parts]
        return self.copies.batch.add(n_copies, copies), sum(n_bytes for _, _, n_bytes in parts)

    def _set_out(self, n: int, n_copies: int, n_bytes: int) -> None:
        """The first of the copies are those of n uploads, which are in the next batch."""
        if not self._flying:
            self._is_measured = self.meter.wanted or self._n_begun % MEASURE_EVERY == 0
            self._n_begun += 1
            if self._is_measured:
                self._stream.record(self._began)
                self.meter.begins()
                self._n_arrived = 0
        self.copies.batch.start(n_copies)
        batch = self._idle.pop()
        self._stream.record(batch.event)
        batch.uploads.n, batch.n_bytes = n, n_bytes
        self._flying.append(batch)
        self._n_flying += n

    def arrived(self) -> Rows:
        """Uploads that have ended since the last call; good until more are started.

        Raises: DeviceLost, CudaError.
        """
        if not (self._flying and self._flying[0].event.passed()):
            return NO_ROWS
        batch = self._flying.popleft()
        uploads, n_bytes = batch.uploads, batch.n_bytes
        self._give(batch)
        while self._flying and self._flying[0].event.passed():
            batch = self._flying.popleft()
            uploads = Rows.of(np.concatenate([uploads.values, batch.uploads.values]))
            n_bytes += batch.n_bytes
            self._give(batch)
        self._n_flying -= uploads.n
        if self._is_measured:
            self._n_arrived += uploads.n
            self._measure(batch.event, n_bytes)
        return uploads

    def _give(self, batch: _Batch) -> None:
        """It has ended."""
        for buffer in batch.buffers:
            self._staging.give(buffer)
        batch.buffers.clear()
        self._idle.append(batch)

    def _measure(self, last: Event, n_bytes: int) -> None:
        """All uploads since `_began` have arrived up to `last`, one behind the other, n_bytes of
        them just now."""
        whole = 1e-3 * last.milliseconds_since(self._began)
        self.meter.ended(whole, n_bytes)
        seconds = whole / self._n_arrived
        share = NEWEST_SHARE if self.seconds else 1.0
        self.seconds += share * (seconds - self.seconds)

    def settle(self) -> Rows:
        """Wait until nothing is under way; the uploads that have ended since `arrived`.

        Blocks for as long as a disk takes.  Raises: DeviceLost, CudaError.
        """
        ended = [self.arrived().values.copy()]
        while self._flying or (self._staged and self._staging.failure is None):
            time.sleep(SETTLE_SECONDS)
            self.start(NO_ROWS)
            ended.append(self.arrived().values.copy())
        return Rows.of(np.concatenate(ended))

    def close(self) -> None:
        """Wait for the copies, a fraction of a millisecond each, and give everything back.

        Raises: CudaError.
        """
        if self._flying:
            self._stream.device.call("cuStreamSynchronize", self._stream.handle)
        self._flying.clear()
        self._resources.close()
