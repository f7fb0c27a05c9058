"""CopyBatch: copies from pinned host memory to a GPU that set out by one call of the driver."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.stream import Stream
from runtime.errors import CudaError, DeviceError, DeviceLost

logger = logging.getLogger(__name__)

U64 = NDArray[np.uint64]
Copy = tuple[int, int, int]
"""(address to copy to, to copy from, bytes)"""

BATCH_VERSION = 12080
"""The first version of the driver that takes many copies by one call; its call is used, which later
drivers have too."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which a source may be read, hints of places, flags."""

    _fields_ = (("order", ctypes.c_int), ("rest", ctypes.c_int * 5))


IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"""


class CopyBatch:
    """Up to `most` copies at a time in a stream, in any order among themselves.

    Whoever starts them writes `targets`, `sources` and `sizes` first, u64[most].  By one call where
    the driver has one for that and takes it: most of a copy's time for the host is the call's.
    """

    def __init__(
        self, stream: Stream, most: int = 64, tell: Callable[[str], object] = logger.warning
    ) -> None:
        """tell: gets why each copy is a call from now on, where the driver takes no batch

        Raises: CudaError.
        """
        self._stream, self._tell = stream, tell
        self._attributes = _Attributes(IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the first copy of these attributes
        self._failed = ctypes.c_size_t(0)
        self._call = _batch_call(stream.device)
        self._room_for(most)

    def _room_for(self, most: int) -> None:
        rows = np.zeros((3, most), np.uint64)
        self.most = most
        self.targets, self.sources, self.sizes = rows
        first = rows.ctypes.data
        self.addresses = first, first + 8 * most, first + 16 * most
        """Of targets, sources and sizes."""

    def add(self, n: int, copies: Sequence[Copy]) -> int:
        """Write these behind the first n, with more room where that is needed; how many there are
        then."""
        end = n + len(copies)
        if end > self.most:
            written = [each[:n] for each in (self.targets, self.sources, self.sizes)]
            self._room_for(2 * end)
            for each, kept in zip((self.targets, self.sources, self.sizes), written, strict=True):
                each[:n] = kept
        for at, copy in enumerate(copies, n):
            self.targets[at], self.sources[at], self.sizes[at] = copy
        return end

    def upload(self, copies: Sequence[Copy]) -> None:
        """Enqueue these.  Raises: DeviceLost, CudaError."""
        self.start(self.add(0, copies))

    def start(self, n: int) -> None:
        """Enqueue the first n.  Raises: DeviceLost, CudaError."""
        if self._call is None or n < 2:
            self._one_by_one(n)
            return
        attributes, first = ctypes.addressof(self._attributes), ctypes.addressof(self._first)
        failed, stream = ctypes.addressof(self._failed), int(self._stream.handle)
        try:
            self._call(*self.addresses, n, attributes, first, 1, failed, stream)
        except DeviceLost:
            raise
        except CudaError as error:
            self._call = None
            self._tell(f"the driver does not take many copies by one call: {error}")
            self._one_by_one(n)

    def _one_by_one(self, n: int) -> None:
        lists = [each[:n].tolist() for each in (self.targets, self.sources, self.sizes)]
        for copy in zip(*lists, strict=True):
            self._stream.upload(*copy)


def _batch_call(device: Device) -> Callable[..., bool] | None:
    """The driver's call for many copies; None: it has none."""
    if device.driver.version < BATCH_VERSION:
        return None
    try:
        return device.native("cuMemcpyBatchAsync", 9, BATCH_VERSION)
    except DeviceLost:
        raise
    except DeviceError:
        return None
