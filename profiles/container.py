"""A file of named arrays behind a msgpack header: written whole or not at all, read with limits.

    magic (8) | header bytes u32 | header (msgpack) | the arrays' bytes, each as the header says

Nothing about a file is believed before it was checked: sizes come before any allocation, and a
packed array is unpacked no further than its shape says.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from profiles.errors import ProfileError

Array = NDArray[Any]

MAGIC = b"\x89HOTEXP\n"
VERSION = 1
HEADER_BYTES = 1 << 20
ARRAYS = 16
DIMENSIONS = 4
TYPES = ("|u1", "<u2", "<u4", "<u8", "<i4", "<f4")
PACK_LEVEL = 6
STALE_SECONDS = 3600.0
LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Contents:
    """What a file holds: facts (msgpack's plain types) and arrays, by name."""

    facts: dict[str, Any]
    arrays: dict[str, Array]


def write(
    path: str | Path,
    kind: str,
    facts: Mapping[str, Any],
    arrays: Mapping[str, Array],
    *,
    packed: bool = True,
) -> None:
    """Replace `path` by a file of that kind: whoever reads it, at any moment, and after a crash or
    a power cut, finds the old file or the new one.

    packed: compress the arrays.
    Raises: OSError, also where something else is there; ProfileError for what is no path.
    """
    path = _as_path(path)
    check_own(path)
    rows, bodies = [], []
    for name, array in arrays.items():
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        body = zlib.compress(array.tobytes(), PACK_LEVEL) if packed else array.tobytes()
        bodies.append(body)
        rows.append(
            {
                "name": name,
                "type": array.dtype.str,
                "shape": list(array.shape),
                "packed": packed,
                "bytes": len(body),
                "crc32": zlib.crc32(body),
            }
        )
    header = {"kind": kind, "version": VERSION, "facts": dict(facts), "arrays": rows}
    encoded = msgpack.packb(header)
    _replace(path, b"".join([MAGIC, LENGTH.pack(len(encoded)), encoded, *bodies]))


def read(path: str | Path, kind: str, max_bytes: int) -> Contents:
    """The contents of a file of that kind whose arrays take at most max_bytes in memory.

    Raises: ProfileError for anything else; OSError where the file cannot be read.
    """
    path = _as_path(path)
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
        raise ProfileError(f"{path}: not a regular file")
    with path.open("rb") as file:
        facts, rows = _header(file, str(path), kind)
        described = [_Row.checked(row, str(path)) for row in rows]
        stored = sum(row.stored_bytes for row in described)
        if stored != os.fstat(file.fileno()).st_size - file.tell():
            raise ProfileError(f"{path}: its length is not that of its arrays")
        if stored > max_bytes or sum(row.n_bytes for row in described) > max_bytes:
            raise ProfileError(f"{path}: more than {max_bytes} bytes of arrays")
        return Contents(facts, {row.name: row.read(file, str(path)) for row in described})


def _as_path(path: object) -> Path:
    """Raises: ProfileError for what no file can be called."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise ProfileError(f"path: {str(path)[:60]!r} cannot be one; use that of a file")
    return Path(path)


def check_own(path: Path) -> None:
    """Raises: OSError where there is something that was not written here: a device, a text."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return
    if is_file:
        with path.open("rb") as file:
            is_file = MAGIC.startswith(file.read(len(MAGIC)))  # fewer bytes: of one cut off
    if not is_file:
        raise FileExistsError(errno.EEXIST, "is not a file of hotexpert's, and stays", str(path))


def _header(file: BinaryIO, name: str, kind: str) -> tuple[dict[str, Any], list[object]]:
    """Facts, and what describes the arrays, of a file at its start.  Raises: ProfileError."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ProfileError(f"{name}: not a file of hotexpert's")
    head = file.read(LENGTH.size)
    n_header = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    if not 0 < n_header <= HEADER_BYTES:
        raise ProfileError(f"{name}: a header of {n_header} bytes")
    header = _unpacked(file.read(n_header), n_header, name)
    if header.get("kind") != kind or header.get("version") != VERSION:
        raise ProfileError(
            f"{name}: holds {str(header.get('kind'))[:40]!r} of version "
            f"{str(header.get('version'))[:20]}, not {kind!r} of version {VERSION}"
        )
    facts, rows = header.get("facts"), header.get("arrays")
    if not isinstance(facts, dict) or not isinstance(rows, list) or len(rows) > ARRAYS:
        raise ProfileError(f"{name}: the header has no facts or no list of arrays")
    return facts, rows


@dataclass(frozen=True)
class _Row:
    """How the header describes an array."""

    name: str
    type: str
    shape: tuple[int, ...]
    packed: bool
    stored_bytes: int
    crc32: int

    @classmethod
    def checked(cls, row: object, file_name: str) -> _Row:
        """Raises: ProfileError for a row that describes no array."""
        wrong = ProfileError(f"{file_name}: the header describes an array wrongly")
        if not isinstance(row, dict):
            raise wrong
        name, type_, shape = row.get("name"), row.get("type"), row.get("shape")
        packed, n_bytes, crc32 = row.get("packed"), row.get("bytes"), row.get("crc32")
        if not isinstance(name, str) or type_ not in TYPES or not isinstance(shape, list):
            raise wrong
        if len(shape) > DIMENSIONS or not all(_is_size(size) for size in shape):
            raise wrong
        if type(packed) is not bool or type(n_bytes) is not int or type(crc32) is not int:
            raise wrong
        if not _is_size(n_bytes) or not _is_size(crc32):
            raise wrong
        return cls(name, type_, tuple(shape), packed, n_bytes, crc32)

    @property
    def n_bytes(self) -> int:
        """In memory."""
        return math.prod(self.shape) * np.dtype(self.type).itemsize

    def read(self, file: BinaryIO, file_name: str) -> Array:
        """Raises: ProfileError for bytes that are missing, changed, or too many or too few."""
        body = file.read(self.stored_bytes)
        if len(body) != self.stored_bytes or zlib.crc32(body) != self.crc32:
            raise ProfileError(f"{file_name}: the bytes of {self.name!r} are cut off or changed")
        if self.packed:
            body = self._unpack(body, file_name)
        if len(body) != self.n_bytes:
            raise ProfileError(f"{file_name}: {self.name!r} has too few bytes for its shape")
        return np.frombuffer(body, self.type).reshape(self.shape)

    def _unpack(self, body: bytes, file_name: str) -> bytes:
        unpacker = zlib.decompressobj()
        try:
            plain = unpacker.decompress(body, self.n_bytes + 1)
        except zlib.error as error:
            raise ProfileError(f"{file_name}: {self.name!r} cannot be unpacked: {error}") from error
        return plain


def _unpacked(encoded: bytes, n_bytes: int, name: str) -> dict[str, Any]:
    """Raises: ProfileError for a header that is cut off or no map."""
    if len(encoded) != n_bytes:
        raise ProfileError(f"{name}: the header is cut off")
    try:
        header = msgpack.unpackb(encoded)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProfileError(f"{name}: the header is no msgpack: {error}") from error
    if not isinstance(header, dict):
        raise ProfileError(f"{name}: the header is no map")
    return header


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _replace(path: Path, content: bytes) -> None:
    """Write beside `path`, to the disk, then rename; where it is a link, what it leads to."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{path.name}.", ".tmp"
    _remove_stale(path.parent, prefix, suffix)
    beside = path.parent / f"{prefix}{secrets.token_hex(8)}{suffix}"
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_stale(folder: Path, prefix: str, suffix: str) -> None:
    """Remove what writers left that were killed."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(suffix):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
