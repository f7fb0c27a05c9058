"""HeaderReader: a forward cursor over a GGUF header that never reads past the file.

Every length is a Python integer (it cannot wrap) and is compared with the bytes the file really has
before anything is allocated for it.
"""

from __future__ import annotations

import os
import struct
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import CorruptModel

MAX_HEADER_BYTES = 64 << 20
"""Far above every published model's (12 MB for a vocabulary of 250k): bounds what a file can ask
for."""

_READ_BYTES = 4 << 20
_FIRST_READ_BYTES = 1 << 20
_U64 = struct.Struct("<Q")


class HeaderReader:
    """Reads the open file `fd` of `file_bytes` bytes; `path` is for messages.

    Every method raises CorruptModel with the byte position when the file ends too early.
    """

    def __init__(self, fd: int, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.position = 0
        self._fd = fd
        self._data = b""

    @property
    def bytes_left(self) -> int:
        return self.file_bytes - self.position

    def corrupt(self, what: str, position: int | None = None) -> CorruptModel:
        """The error that `what` is wrong at `position` (default: here)."""
        at = self.position if position is None else position
        return CorruptModel(self.path, f"byte {at}: {what}")

    def raw(self, n_bytes: int, what: str) -> bytes:
        """The next `n_bytes` bytes."""
        self._need(n_bytes, what)
        start = self.position
        self.position += n_bytes
        return self._data[start : self.position]

    def uint(self, n_bytes: int, what: str) -> int:
        """A little-endian unsigned integer of `n_bytes` bytes."""
        return int.from_bytes(self.raw(n_bytes, what), "little")

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> list[Any]:
        """`count` numbers as Python ones."""
        values: list[Any] = np.frombuffer(self.raw(count * dtype.itemsize, what), dtype).tolist()
        return values

    def sized(self, what: str, max_bytes: int) -> bytes:
        """A byte string of 1 to `max_bytes` bytes behind its u64 length."""
        start = self.position
        length = self.uint(8, f"length of {what}")
        if not 1 <= length <= max_bytes:
            raise self.corrupt(f"{what} has {length} bytes; 1 to {max_bytes} are allowed", start)
        return self.raw(length, what)

    def string(self, what: str) -> str:
        """A UTF-8 string behind its u64 length."""
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; one tight loop, because vocabularies have hundreds of thousands."""
        start, raw = self.position, list[bytes]()
        append, unpack = raw.append, _U64.unpack_from
        data, position = self._data, start
        for _ in range(count):
            begin = position + 8
            if begin > len(data):
                self.position = position
                self._need(8, f"length of {what}")
                data = self._data
            position = begin + unpack(data, position)[0]
            if position > len(data):
                self.position = begin
                self._need(position - begin, what)
                data = self._data
            append(data[begin:position])
        self.position = position
        try:
            # All at once, which takes half as long; what has a NUL itself is decoded one by one.
            texts = b"\0".join(raw).decode().split("\0")
            return texts if len(texts) == count else [text.decode() for text in raw]
        except UnicodeDecodeError as error:
            at = start + sum(8 + len(text) for text in takewhile(_is_utf8, raw))
            raise self.corrupt(f"{what} is not UTF-8", at) from error

    def _need(self, n_bytes: int, what: str) -> None:
        """Have `n_bytes` more bytes in `_data`."""
        end = self.position + n_bytes
        if end > self.file_bytes:
            raise self.corrupt(
                f"{what} of {n_bytes} bytes runs past the file's {self.file_bytes} bytes"
            )
        if end > MAX_HEADER_BYTES:
            raise self.corrupt(f"{what} of {n_bytes} bytes: the header passes {MAX_HEADER_BYTES}")
        while len(self._data) < end:
            have = len(self._data)
            step = _READ_BYTES if have else _FIRST_READ_BYTES
            more = os.pread(self._fd, max(end - have, step), have)
            if not more:
                raise self.corrupt("the file became shorter while it was read")
            self._data += more


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
