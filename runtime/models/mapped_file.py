"""MappedFile: one open file and its read-only map; renaming or removing it changes neither."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import CorruptModel, ModelError

U8 = NDArray[np.uint8]

WANTED = getattr(mmap, "MADV_WILLNEED", None)
SCATTERED = getattr(mmap, "MADV_RANDOM", None)


class MappedFile:
    """The regular file at `path`, open for reading; `map()` before the first `view()`.

    Raises: ModelError when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = _open_regular(path)
        self.n_bytes = os.fstat(self.fd).st_size
        self._bytes: U8 | None = None

    def map(self) -> None:
        """Map the whole file.  Raises: ModelError."""
        # Shared and read-only: the pages are the page cache's own, and a GPU driver may register
        # them in place.
        try:
            mapped = mmap.mmap(self.fd, self.n_bytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: cannot be mapped: {error}") from error
        self._bytes = np.frombuffer(mapped, np.uint8)

    def view(self, offset: int, n_bytes: int) -> U8:
        """u8[n_bytes], read-only; keeps the map alive even after `close`."""
        return self._mapped()[offset : offset + n_bytes]

    @property
    def address(self) -> int:
        """Where the map begins."""
        return self._mapped().ctypes.data

    def check_unchanged(self) -> None:
        """Raises: CorruptModel when the file is shorter than its map: reading on would be fatal."""
        if self.fd < 0:
            raise ModelError(f"{self.path}: is closed")
        now = os.fstat(self.fd).st_size
        if now < self.n_bytes:
            raise CorruptModel(
                self.path, f"was cut from {self.n_bytes} to {now} bytes while it was open"
            )

    def close(self) -> None:
        """Close the file; the map goes with the last view of it.  May be called again."""
        self._bytes = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _mapped(self) -> U8:
        if self._bytes is None:
            raise ModelError(f"{self.path}: is closed")
        return self._bytes


def want_pages(address: int, n_bytes: int) -> None:
    """Have the kernel read these bytes of a map soon, if they are not in memory.  Returns at once.

    A reader that only touches pages waits for one small read after the other: experts of 0.9 MB
    came at 0.26 GB/s from a disk, and at 0.9 GB/s after this.  (Without it, the kernel's advice for
    random access makes it 0.05 GB/s: maps keep the usual read-ahead.)
    """
    if WANTED is None:
        return
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    # Only a hint: whatever it returns changes nothing.
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + n_bytes - start), WANTED)


def expect_scattered_reads(address: int, n_bytes: int) -> None:
    """Have the kernel bring only those pages of this part of a map that are asked for or touched.

    For tables of which single rows are read: their neighbours would fill the memory that experts
    need, 128 KiB or more a row, as the disk's read-ahead is set.
    """
    if SCATTERED is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:  # only a hint, too
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), SCATTERED)


def are_pages_here(address: int, n_bytes: int) -> bool:
    """Whether all of these bytes of a map are in memory; False where the kernel does not say.

    Linux tells the file's owner and whoever may write it; it says yes to everybody else.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    n_bytes += address - start
    found = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
    if _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), found):
        return False
    return all(page & 1 for page in found)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _open_regular(path: Path) -> int:
    """A descriptor of the regular file `path`; never waits, as opening a FIFO would."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a NUL character in the name
        raise ModelError(f"{str(path)!r}: cannot be opened: {error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelError(f"{path}: is not a regular file")
    return fd
