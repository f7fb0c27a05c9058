"""Memory of the GPU, and host memory that the GPU reads and copies from directly.

Allocations are few and large: an `Arena` is one of them, cut into slots. Whoever closes memory
knows that no work in flight uses it.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.resource import Resource
from runtime.errors import CudaError, DeviceLost, EngineBug, PinningFailed

SLOT_ALIGNMENT = 256
"""Bytes; what the driver's own allocations have too, and more than any kernel's loads need."""

TOUCH_BYTES = 64 << 20
TOUCH_THREADS = 8


class DeviceBuffer(Resource):
    """Bytes of device memory, not initialized."""

    def __init__(self, device: Device, nbytes: int, label: str = "buffer") -> None:
        """Raises: OutOfDeviceMemory with `asked` and `free`, CudaError."""
        self.nbytes = nbytes
        super().__init__(device, int(device.call("cuMemAlloc", nbytes, asked=nbytes)), label)

    @property
    def address(self) -> int:
        """Where it begins in the GPU's memory. Raises: EngineBug once it is closed."""
        return int(self.handle)

    def _release(self, handle: Any) -> None:
        self.device.call("cuMemFree", handle)

    def __str__(self) -> str:
        return f"{super().__str__()} of {self.nbytes} bytes"


class RegisteredMemory(Resource):
    """Host memory of another owner, such as a mapped file, pinned where it lies.

    array       a C-contiguous array; it is kept alive until `close`
    read_only   the pages may not be written: required for a read-only map, which must be shared
                (registering a private one did not return)
    """

    def __init__(
        self, device: Device, array: NDArray[Any], label: str = "host", *, read_only: bool = False
    ) -> None:
        """Raises: PinningFailed, DeviceLost; EngineBug if the array has gaps."""
        if not array.flags.c_contiguous:
            raise EngineBug(f"{label}: only contiguous memory can be registered")
        kinds = device.driver.api
        flags = kinds.CU_MEMHOSTREGISTER_PORTABLE | kinds.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            flags |= kinds.CU_MEMHOSTREGISTER_READ_ONLY
        self.nbytes = array.nbytes
        self._array: NDArray[Any] | None = array
        host = array.ctypes.data
        try:
            device.call("cuMemHostRegister", host, array.nbytes, flags)
        except DeviceLost:
            raise
        except CudaError as error:
            raise PinningFailed(array.nbytes, f"{error.call}: {error.code}") from error
        super().__init__(device, host, label)
        self._address: int | None = None

    @property
    def host(self) -> int:
        """Its address for the CPU and for copies. Raises: EngineBug once it is closed."""
        return int(self.handle)

    @property
    def address(self) -> int:
        """Its address for kernels. Raises: CudaError, EngineBug once it is closed."""
        host = self.host
        if self._address is None:
            self._address = int(self.device.call("cuMemHostGetDevicePointer", host, 0))
        return self._address

    def address_on(self, device: Device) -> int:
        """Its address for kernels of another GPU.  Raises: CudaError, EngineBug."""
        if device is self.device:
            return self.address
        return int(device.call("cuMemHostGetDevicePointer", self.host, 0))

    def _release(self, handle: Any) -> None:
        self._array = None
        self.device.call("cuMemHostUnregister", handle)

    def __str__(self) -> str:
        return f"{super().__str__()} of {self.nbytes} bytes"


class PinnedBuffer(RegisteredMemory):
    """Pinned host memory of its own, zeroed.

    Mapped, touched by several threads and then registered: the driver's own allocation of pinned
    memory manages 2 GB/s, this about 20. `view` is u8[nbytes]; arrays made of it stay safe to
    touch after `close`, and the pages go when the last of them does.
    """

    def __init__(self, device: Device, nbytes: int, label: str = "pinned") -> None:
        """Raises: PinningFailed, DeviceLost."""
        try:
            pages = _anonymous(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise PinningFailed(nbytes, str(error)) from error
        self.view = np.frombuffer(pages, np.uint8)
        _touch(self.view)
        super().__init__(device, self.view, label)


def _anonymous(nbytes: int) -> mmap.mmap:
    """New memory; nothing of it is handed out yet. Raises: OSError, ValueError, OverflowError."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes)
    # Private: a shared anonymous map is shmem, which mostly gets no huge pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork's copy-on-write would move the pages away from those that the GPU knows.
    pages.madvise(mmap.MADV_DONTFORK)
    if nbytes >= TOUCH_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _touch(view: NDArray[np.uint8]) -> None:
    """Have the kernel hand out the pages, in parallel: registering faults them one by one."""
    parts = [view[at : at + TOUCH_BYTES : 4096] for at in range(0, len(view), TOUCH_BYTES)]
    if len(parts) == 1:
        parts[0][:] = 0
        return
    with ThreadPoolExecutor(TOUCH_THREADS, thread_name_prefix="touch") as threads:
        list(threads.map(lambda part: part.fill(0), parts))


@dataclass(frozen=True)
class Slot:
    """A part of an arena: `nbytes` at `address`; `index` counts through the whole arena."""

    index: int
    address: int
    nbytes: int


class Arena(DeviceBuffer):
    """One allocation cut into slots of a few sizes. Taking and giving back are bookkeeping only.

    counts   slots of each size in bytes; sizes are rounded up to SLOT_ALIGNMENT
    """

    def __init__(self, device: Device, counts: Mapping[int, int], label: str = "arena") -> None:
        """Raises: OutOfDeviceMemory, CudaError."""
        sizes: dict[int, int] = {}
        for nbytes, count in counts.items():
            size = slot_bytes(nbytes)
            sizes[size] = sizes.get(size, 0) + count
        super().__init__(device, arena_bytes(counts), label)
        self._sizes = sorted(sizes)
        self._free: dict[int, list[Slot]] = {}
        self._taken: set[Slot] = set()
        index, address = 0, self.address
        for size in self._sizes:
            addresses = range(address, address + sizes[size] * size, size)
            slots = [Slot(index + n, at, size) for n, at in enumerate(addresses)]
            self._free[size] = slots[::-1]
            index, address = index + len(slots), address + len(slots) * size
        self.n_slots = index

    def take(self, nbytes: int) -> Slot | None:
        """A free slot of the smallest size that holds `nbytes`; None if that size has no more.

        A larger size is never used instead: it would be missing where nothing else fits.
        Raises: EngineBug if no size holds as much, or once the arena is closed.
        """
        at = bisect.bisect_left(self._sizes, nbytes)
        if at == len(self._sizes) or self.closed:
            raise EngineBug(f"{self} has no slot of {nbytes} bytes; sizes {self._sizes}")
        free = self._free[self._sizes[at]]
        if not free:
            return None
        slot = free.pop()
        self._taken.add(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """Take the slot back; the caller knows that no work in flight reads it.

        Raises: EngineBug if it is not out.
        """
        if slot not in self._taken:
            raise EngineBug(f"{slot} is not taken from {self}")
        self._taken.remove(slot)
        self._free[slot.nbytes].append(slot)

    @property
    def n_taken(self) -> int:
        return len(self._taken)

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.n_taken} of {self.n_slots} slots taken"


def slot_bytes(nbytes: int) -> int:
    """What a slot for `nbytes` takes of an arena."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def arena_bytes(counts: Mapping[int, int]) -> int:
    """What an arena of these slots allocates."""
    return sum(slot_bytes(nbytes) * count for nbytes, count in counts.items())
