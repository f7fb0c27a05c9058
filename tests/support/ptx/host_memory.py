"""Global memory of the interpreter that is this process's own: an address is where the bytes lie.

For tests in which host code and kernels share memory, as pinned memory is shared with a GPU. What a
kernel may touch is what was opened to it; that it was written first is not checked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.support.ptx.memory import JUNK, Array, Memory

LOWEST = 1 << 16
"""Below this no process has memory."""

SPACE = 1 << 47


class _Space:
    """The whole address space as an array; only places that are known to be memory are indexed."""

    __array_interface__: ClassVar[dict[str, object]] = {
        "shape": (SPACE - LOWEST,),
        "typestr": "|u1",
        "data": (LOWEST, False),
        "version": 3,
    }


class HostBytes:
    """The bytes of the process, `LOWEST` at index 0."""

    def __init__(self) -> None:
        self.data = np.asarray(_Space())

    def get(self, offsets: Array, dtype: DTypeLike, count: int, threads: Array) -> Array:
        """dtype[n, count] at the byte offsets [n]."""
        index = (offsets // np.dtype(dtype).itemsize)[:, None] + np.arange(count)
        values: Array = self.data.view(dtype)[index]
        return values

    def put(self, offsets: Array, values: Array) -> None:
        """Write values [n, count] at the byte offsets [n]."""
        index = (offsets // values.dtype.itemsize)[:, None] + np.arange(values.shape[1])
        self.data.view(values.dtype)[index] = values


class HostMemory(Memory):
    """Kernels may touch what `open` was told of, until `close`."""

    base = LOWEST

    def __init__(self) -> None:
        super().__init__(0)
        self.bytes: Any = HostBytes()
        self._kept: list[NDArray[np.uint8]] = []

    def open(self, address: int, n_bytes: int, *, writable: bool = True) -> None:
        """Let kernels touch the bytes; neighbours stay separate."""
        index = bisect_left(self.starts, address - LOWEST)
        self.starts.insert(index, address - LOWEST)
        self.ends.insert(index, address - LOWEST + n_bytes)
        self.writable.insert(index, writable)

    def close(self, address: int) -> None:
        """Take back what was opened at the address."""
        index = self.starts.index(address - LOWEST)
        del self.starts[index], self.ends[index], self.writable[index]

    def reserve(self, n_bytes: int, *, writable: bool = True) -> int:
        memory = np.full(n_bytes + 256, JUNK, np.uint8)
        self._kept.append(memory)
        address = -(-memory.ctypes.data // 256) * 256
        self.open(address, n_bytes, writable=writable)
        return address

    def write(self, address: int, array: Array) -> None:
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes.data[address - LOWEST :][: len(values)] = values

    def read(self, address: int, dtype: DTypeLike, shape: int | Sequence[int]) -> Array:
        n_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
        return self.bytes.data[address - LOWEST :][:n_bytes].copy().view(dtype).reshape(shape)
