"""Staging: pinned buffers through which experts travel that are not pinned where they lie.

A thread reads them, maybe from a disk, into a buffer, and from there the link takes them. No step
waits for either. It is the way of `--load-mode mmap` and of models larger than the memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer
from runtime.errors import DeviceError
from runtime.experts.cache import Upload
from runtime.experts.host_experts import Part
from runtime.experts.pinned_pages import bytes_at
from runtime.models.mapped_file import want_pages

logger = logging.getLogger(__name__)


class Staging:
    """`n_buffers` of `n_bytes` each, allocated when the first expert comes.

    `start`, and later `read` gives it back with its buffer, which is free again after `give`.
    """

    def __init__(self, device: Device, n_bytes: int, n_buffers: int) -> None:
        self._device, self._n_bytes = device, n_bytes
        self._free: deque[int] = deque(range(n_buffers))
        self._buffers: dict[int, PinnedBuffer] = {}
        self._wanted: SimpleQueue[tuple[Upload, int, Sequence[Part]] | None] = SimpleQueue()
        self._read: deque[tuple[Upload, int]] = deque()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why no more can be read."""

    @property
    def room(self) -> int:
        """Experts that may be started now."""
        return 0 if self.failure else len(self._free)

    def start(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Have the expert read; at most `room` times."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="expert staging", daemon=True)
            self._thread.start()
        self._wanted.put((upload, self._free.popleft(), parts))

    def read(self) -> list[tuple[Upload, int]]:
        """(upload, buffer) of those that were read since the last call."""
        found = []
        while self._read:
            found.append(self._read.popleft())
        return found

    def address(self, buffer: int) -> int:
        """Where the expert lies that was read into it, as it is to lie in its slot."""
        return self._buffers[buffer].host

    def give(self, buffer: int) -> None:
        """Nothing reads the buffer any more."""
        self._free.append(buffer)

    def close(self) -> None:
        """No copy from a buffer is in flight.  Waits for the read of one expert at most."""
        self.failure = self.failure or "closed"
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and self.failure is None:
            upload, buffer, parts = wanted
            try:
                self._copy(buffer, parts)
            except DeviceError as error:
                logger.warning("experts are no longer copied to the GPU: %s", error)
                self.failure = str(error)
                return
            self._read.append((upload, buffer))

    def _copy(self, buffer: int, parts: Sequence[Part]) -> None:
        """Raises: PinningFailed, DeviceLost."""
        if buffer not in self._buffers:
            self._buffers[buffer] = PinnedBuffer(self._device, self._n_bytes, "expert staging")
        view = self._buffers[buffer].view
        for _, address, n_bytes in parts:
            want_pages(address, n_bytes)
        for offset, address, n_bytes in parts:
            view[offset : offset + n_bytes] = bytes_at(address, n_bytes)
