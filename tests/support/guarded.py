"""Buffers that end at a page without access: reading or writing past them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

PROT_NONE = 0


class GuardedBuffer:
    """Bytes in memory whose end is the end of the last accessible page.

    `address` is that of the first byte, `bytes` a writable view of all.
    """

    def __init__(self, content: NDArray[np.uint8]) -> None:
        content = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        page = mmap.PAGESIZE
        usable = -(-content.size // page) * page
        self._map = mmap.mmap(-1, usable + page)
        whole = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        guard = ctypes.c_void_p(whole.ctypes.data + usable)
        if libc.mprotect(guard, ctypes.c_size_t(page), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes = whole[usable - content.size : usable]
        self.bytes[:] = content
        self.address = int(self.bytes.ctypes.data)
