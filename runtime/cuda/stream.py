"""Streams and events: the order in which a GPU works, and marks in it."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

from runtime.cuda.device import Device
from runtime.cuda.resource import Resource
from runtime.errors import EngineBug


class Event(Resource):
    """A mark in a stream. `timed` ones can tell the time between two of them."""

    def __init__(self, device: Device, label: str = "event", *, timed: bool = False) -> None:
        """Raises: CudaError."""
        kinds = device.driver.api.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if timed else kinds.CU_EVENT_DISABLE_TIMING
        super().__init__(device, device.call("cuEventCreate", int(flags)), label)
        self._query = device.native("cuEventQuery", 1)
        self._elapsed = device.native("cuEventElapsedTime", 3)
        self._milliseconds = ctypes.c_float()

    def passed(self) -> bool:
        """Whether the GPU has passed its last `Stream.record`; never waits.

        Raises: DeviceLost, CudaError: also those of work before the mark.
        """
        return self._query(int(self.handle))

    def milliseconds_since(self, start: Event) -> float:
        """GPU time between two timed events that were passed. Raises: CudaError, EngineBug."""
        found = self._milliseconds
        if not self._elapsed(ctypes.addressof(found), int(start.handle), int(self.handle)):
            raise EngineBug("the time between events was asked for before they were passed")
        return found.value

    def _release(self, handle: Any) -> None:
        self.device.call("cuEventDestroy", handle)


class Stream(Resource):
    """Work in order. A lower `priority` number goes first; the driver clamps it to its range."""

    def __init__(self, device: Device, label: str = "stream", *, priority: int = 0) -> None:
        """Raises: CudaError."""
        # Non-blocking: the legacy default stream of another library does not order this one.
        flags = int(device.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = device.call("cuStreamCreateWithPriority", flags, priority)
        super().__init__(device, handle, label)
        self._record = device.native("cuEventRecord", 2)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy host memory at `source` to device memory; blocks the caller unless it is pinned.

        Never in a stream that a decode step waits for: behind queued uploads of another stream
        such a copy has starved for seconds. Raises: CudaError.
        """
        self.device.call("cuMemcpyHtoDAsync", target, source, nbytes, self.handle)

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy device memory to host memory at `target`. Raises: CudaError."""
        self.device.call("cuMemcpyDtoHAsync", target, source, nbytes, self.handle)

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """Set device memory to a byte. Raises: CudaError."""
        self.device.call("cuMemsetD8Async", target, byte, nbytes, self.handle)

    def record(self, event: Event) -> None:
        """Put the event behind all work so far. Raises: CudaError."""
        self._record(int(event.handle), int(self.handle))

    def wait_for(self, event: Event) -> None:
        """Let later work of this stream start only behind the event. Raises: CudaError."""
        self.device.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy device memory to device memory. Raises: CudaError."""
        self.device.call("cuMemcpyDtoDAsync", target, source, nbytes, self.handle)

    def idle(self) -> bool:
        """Whether all work has ended; never waits.

        Raises: DeviceLost, CudaError: also those of the work.
        """
        return self.device.ready("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        """Block this thread until all work is done; the event loop uses `completion.reached`.

        Raises: EngineBug on a thread that runs an event loop; DeviceLost, CudaError.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.device.call("cuStreamSynchronize", self.handle)
        else:
            raise EngineBug("Stream.synchronize would block the event loop")

    def _release(self, handle: Any) -> None:
        self.device.call("cuStreamDestroy", handle)
