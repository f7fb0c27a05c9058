"""Global and shared memory that notice what a sanitizer would."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.support.ptx.errors import MemoryFault, Race, UninitialisedRead, culprits
from tests.support.ptx.syntax import Variable

Array = NDArray[Any]

GLOBAL_BASE = 0x7F5A_4000_0000
"""Where allocations start: beyond 32 bits, so an address cut to them is noticed."""

WRITTEN, IN_FLIGHT = 1, 2
"""States of a byte that are not undefined."""

JUNK = 0xA7
"""What memory holds before it is written."""

GUARD = 512
"""Unallocated bytes after every allocation."""


class Bytes:
    """A row of bytes, each of them undefined, written, or in flight from an asynchronous copy.

    An element may be read if one of its bytes was written, since kernels read whole words at the
    ends of unaligned data; if not `strict`, one that was never written may be read too, but none
    in flight. Undefined bytes hold `JUNK`, so a result that depends on them is wrong.
    """

    def __init__(self, n_bytes: int, *, strict: bool = True) -> None:
        n_bytes = -(-n_bytes // 16) * 16
        self.strict = strict
        self.data = np.zeros(n_bytes, np.uint8)
        self.state = np.zeros(n_bytes, np.uint8)

    def get(self, offsets: Array, dtype: DTypeLike, count: int, threads: Array) -> Array:
        """dtype[n, count] at the byte offsets [n].

        Raises:
            UninitialisedRead: no byte of an element was written, or one is in flight.
        """
        size = np.dtype(dtype).itemsize
        index = (offsets // size)[:, None] + np.arange(count)
        state = self.state.view(f"u{size}")[index]
        if self.strict and not state.all():
            wrong = culprits(threads, state == 0)
            raise UninitialisedRead("reads memory that was never written", wrong)
        if (flying := state & IN_FLIGHT * _ONES[size]).any():
            wrong = culprits(threads, flying != 0)
            raise UninitialisedRead("reads what an asynchronous copy has not brought yet", wrong)
        values: Array = self.data.view(dtype)[index]
        return values

    def put(self, offsets: Array, values: Array) -> None:
        """Write values [n, count] at the byte offsets [n]."""
        size = values.dtype.itemsize
        index = (offsets // size)[:, None] + np.arange(values.shape[1])
        self.data.view(values.dtype)[index] = values
        self.state.view(f"u{size}")[index] = WRITTEN * _ONES[size]


_ONES = {size: int.from_bytes(b"\x01" * size, "little") for size in (1, 2, 4, 8)}


class Memory:
    """The device's global memory: separate allocations with guards between them."""

    base = GLOBAL_BASE
    """The address of byte 0."""

    def __init__(self, n_bytes: int = 1 << 26) -> None:
        self.bytes = Bytes(n_bytes)
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.writable: list[bool] = []
        self.symbols: dict[Variable, int] = {}
        self.top = 0

    def reserve(self, n_bytes: int, *, writable: bool = True) -> int:
        """The address of a new allocation whose contents are undefined."""
        start = self.top
        self.top += -(-(n_bytes + GUARD) // 256) * 256
        if self.top > len(self.bytes.data):
            raise ValueError(f"Memory({len(self.bytes.data)}) is too small: ask for more")
        self.bytes.data[start : start + n_bytes] = JUNK
        self.starts.append(start)
        self.ends.append(start + n_bytes)
        self.writable.append(writable)
        return GLOBAL_BASE + start

    def place(self, array: Array, *, writable: bool = True) -> int:
        """The address of a copy of the array."""
        address = self.reserve(array.nbytes, writable=writable)
        self.write(address, array)
        return address

    def write(self, address: int, array: Array) -> None:
        """Copy the array to the address, as the host does."""
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        span = slice(address - GLOBAL_BASE, address - GLOBAL_BASE + len(values))
        self.bytes.data[span] = values
        self.bytes.state[span] = WRITTEN

    def read(self, address: int, dtype: DTypeLike, shape: int | Sequence[int]) -> Array:
        """A copy of an array at the address, as the host sees it; all of it must be written."""
        n_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
        span = slice(address - GLOBAL_BASE, address - GLOBAL_BASE + n_bytes)
        if not self.bytes.state[span].all():
            first = int(np.argmin(self.bytes.state[span]))
            raise UninitialisedRead(f"byte {first} of {n_bytes} was never written")
        return self.bytes.data[span].view(dtype).reshape(shape).copy()

    def symbol(self, variable: Variable) -> int:
        """The address of a module's variable, placed with its initial values at first use."""
        if variable not in self.symbols:
            self.symbols[variable] = self.reserve(
                variable.n_bytes, writable=variable.space != "const"
            )
            if variable.values is not None:
                self.write(self.symbols[variable], initial_values(variable))
        return self.symbols[variable]

    def load(self, threads: Array, addresses: Array, dtype: DTypeLike, count: int) -> Array:
        """dtype[n, count] of the threads' addresses u64[n]."""
        size = np.dtype(dtype).itemsize * count
        return self.bytes.get(self.offsets(threads, addresses, size), dtype, count, threads)

    def store(self, threads: Array, addresses: Array, values: Array) -> None:
        """Write values [n, count]; of two threads at one address the last wins."""
        size = values.dtype.itemsize * values.shape[1]
        self.bytes.put(self.offsets(threads, addresses, size, write=True), values)

    def offsets(self, threads: Array, addresses: Array, size: int, *, write: bool = False) -> Array:
        """Where in `bytes` the accesses of `size` bytes begin.

        Raises:
            MemoryFault: one is misaligned, outside the allocations, or may not write.
        """
        aligned(threads, addresses, size)
        offsets = (addresses - np.uint64(self.base)).astype(np.int64)
        low, high = int(offsets.min()), int(offsets.max())
        index = bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.ends[index]:
            if write and not self.writable[index]:
                raise MemoryFault("writes read-only memory", threads)
            return offsets
        if not self.starts:
            raise MemoryFault("no memory is allocated", threads)
        indices = np.searchsorted(self.starts, offsets, "right") - 1
        outside = (indices < 0) | (offsets + size > np.asarray(self.ends)[indices])
        if outside.any():
            address = int(addresses[outside][0])
            message = f"{'writes' if write else 'reads'} {size} bytes at {address:#x}"
            raise MemoryFault(f"{message}, {self._where(address)}", threads[outside])
        if write and not np.asarray(self.writable)[indices].all():
            raise MemoryFault("writes read-only memory", threads)
        return offsets

    def _where(self, address: int) -> str:
        index = bisect_right(self.starts, address - self.base) - 1
        if index < 0:
            return "before every allocation"
        beyond = address - self.base - self.ends[index]
        return f"{beyond} bytes from the end of allocation {index}"


class Shared:
    """The shared memory of every block of a launch, and who touched which byte of it.

    Two accesses of one byte, one of them a write, by two threads need a barrier between them: of
    the block, or of the warp (`bar.warp.sync`) where both are in one warp.
    """

    def __init__(
        self, n_blocks: int, n_bytes: int, block_of: Array, warp_of: Array, *, strict: bool
    ) -> None:
        self.n_bytes = n_bytes
        self.stride = -(-n_bytes // 16) * 16
        self.bytes = Bytes(n_blocks * self.stride, strict=strict)
        self.bytes.data[:] = JUNK
        self.block_of = block_of
        self.warp_of = warp_of
        size = n_blocks * self.stride
        self.writer, self.reader = (np.full(size, -1, np.int32) for _ in range(2))
        self.read_twice = np.zeros(size, bool)
        self.written_at = np.zeros(size, np.int32)
        self.read_at = np.zeros(size, np.int32)
        self.epoch = np.zeros(len(block_of), np.int64)
        """Warp barriers that each thread has passed."""

    def load(self, threads: Array, addresses: Array, dtype: DTypeLike, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        offsets = self.offsets(threads, addresses, size)
        values = self.bytes.get(offsets, dtype, count, threads)
        self._read(threads, offsets, size)
        return values

    def store(self, threads: Array, addresses: Array, values: Array) -> None:
        size = values.dtype.itemsize * values.shape[1]
        offsets = self.offsets(threads, addresses, size)
        self._write(threads, offsets, size)
        self.bytes.put(offsets, values)

    def expect(self, threads: Array, addresses: Array, size: int) -> None:
        """An asynchronous copy to the bytes has begun."""
        offsets = self.offsets(threads, addresses, size)
        self._write(threads, offsets, size)
        self.bytes.state[_spans(offsets, size)] = IN_FLIGHT

    def arrive(self, threads: Array, addresses: Array, values: Array) -> None:
        """Write what an asynchronous copy brings."""
        offsets = self.offsets(threads, addresses, values.dtype.itemsize * values.shape[1])
        self.bytes.put(offsets, values)

    def block_barrier(self, block: int) -> None:
        span = slice(block * self.stride, (block + 1) * self.stride)
        self.writer[span] = -1
        self.reader[span] = -1
        self.read_twice[span] = False

    def offsets(self, threads: Array, addresses: Array, size: int, *, write: bool = False) -> Array:
        """Where in `bytes` the accesses of `size` bytes begin."""
        aligned(threads, addresses, size)
        outside = addresses.astype(np.uint64) + np.uint64(size) > self.n_bytes
        if outside.any():
            address = int(addresses[outside][0])
            message = f"touches {size} bytes at {address} of {self.n_bytes} bytes of shared memory"
            raise MemoryFault(message, threads[outside])
        offsets: Array = addresses.astype(np.int64) + self.block_of[threads] * self.stride
        return offsets

    def _read(self, threads: Array, offsets: Array, size: int) -> None:
        span, reader = _spans(offsets, size), threads[:, None]
        self._unless_ordered(threads, self.writer[span], self.written_at[span], "written")
        earlier, epoch = self.reader[span], self.epoch[threads][:, None]
        same_warp = self.warp_of[earlier] == self.warp_of[reader]
        ordered = same_warp & (self.read_at[span] < epoch)
        others = (earlier != -1) & (earlier != reader)
        self.read_twice[span] = (self.read_twice[span] | others) & ~ordered
        self.reader[span] = reader
        self.read_twice[span] |= self.reader[span] != reader
        self.read_at[span] = epoch

    def _write(self, threads: Array, offsets: Array, size: int) -> None:
        span, writer = _spans(offsets, size), threads[:, None]
        self._unless_ordered(threads, self.writer[span], self.written_at[span], "written")
        self._unless_ordered(threads, self.reader[span], self.read_at[span], "read")
        shared_read = self.read_twice[span] & (self.read_at[span] == self.epoch[threads][:, None])
        if shared_read.any():
            raise Race("writes what other threads read", culprits(threads, shared_read))
        self.writer[span] = writer
        self.written_at[span] = self.epoch[threads][:, None]
        if (clash := self.writer[span] != writer).any():
            raise Race("writes a byte that another thread writes", culprits(threads, clash))

    def _unless_ordered(self, threads: Array, other: Array, when: Array, verb: str) -> None:
        """Raise unless each earlier access was the same thread's or has a barrier after it."""
        mine = threads[:, None]
        foreign = (other != -1) & (other != mine)
        if not foreign.any():
            return
        ordered = (self.warp_of[other] == self.warp_of[mine]) & (when < self.epoch[mine])
        if (wrong := foreign & ~ordered).any():
            raise Race(
                f"touches a byte {verb} by another thread with no barrier between",
                culprits(threads, wrong),
            )


def aligned(threads: Array, addresses: Array, size: int) -> None:
    """Raise unless every address is a multiple of the access's size."""
    wrong = (addresses & addresses.dtype.type(size - 1)) != 0
    if wrong.any():
        address = int(addresses[wrong][0])
        raise MemoryFault(f"{size} bytes at the misaligned address {address:#x}", threads[wrong])


def initial_values(variable: Variable) -> Array:
    """A module variable's first contents; values left out are zero."""
    values = np.zeros(variable.count, _ARRAY_TYPES[variable.type])
    for i, item in enumerate(variable.values or ()):
        bits = getattr(item, "bits", None)
        if bits is not None:
            values.view(f"u{values.itemsize}")[i] = bits
        else:
            value = item.value
            n_bits = 8 * values.itemsize
            wrap = int(value) % (1 << n_bits) if values.dtype.kind != "f" else value
            values.view(f"u{values.itemsize}" if values.dtype.kind != "f" else values.dtype)[i] = (
                wrap
            )
    return values


_ARRAY_TYPES = {f"{kind}{8 * size}": f"u{size}" for kind in "bus" for size in (1, 2, 4, 8)}
_ARRAY_TYPES |= {"f16": "f2", "f32": "f4", "f64": "f8"}


def _spans(offsets: Array, size: int) -> Array:
    spans: Array = offsets[:, None] + np.arange(size)
    return spans
