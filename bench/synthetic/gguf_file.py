"""Parts of a GGUF file, and the file from them, written in parallel."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.synthetic.blocks import U8, random_blocks
from ops.quants import BlockFormat

ALIGNMENT = 32
POOL_BLOCKS = 50_021
PIECE_BYTES = 256 << 20
"""What one thread writes in one go: matrices of experts are larger than that."""
UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10

Make = Callable[[np.random.Generator], NDArray[np.float32]]


@dataclass(frozen=True)
class Part:
    """A tensor to write.

    shape  in GGUF order
    std    of random blocks, where nothing else says what the tensor holds
    make   draws its f32 values
    hole   it has no bytes on the disk: all zeros
    """

    name: str
    shape: tuple[int, ...]
    fmt: BlockFormat
    std: float = 0.0
    make: Make | None = None
    hole: bool = False

    @property
    def n_bytes(self) -> int:
        return self.fmt.row_bytes(self.shape[0]) * int(np.prod(self.shape[1:], dtype=np.int64))


def write_file(
    path: Path, keys: Mapping[str, object], parts: Sequence[Part], seed: int, n_threads: int = 8
) -> None:
    """Write the file.  The same arguments give the same bytes, whatever the number of threads."""
    head = header(keys, parts)
    pools = _Pools(seed)
    with path.open("wb") as out, ThreadPoolExecutor(n_threads) as threads:
        out.write(head)
        out.flush()
        fd, at, jobs = out.fileno(), len(head), []
        for index, part in enumerate(parts):
            for first in range(0, 0 if part.hole else part.n_bytes, _piece_bytes(part)):
                rng = np.random.default_rng((seed, index, first))
                n_bytes = min(_piece_bytes(part), part.n_bytes - first)
                jobs.append(threads.submit(_write, fd, at + first, part, n_bytes, pools, rng))
            at += _aligned(part.n_bytes)
        # A hole at the end is part of the file, too.
        os.ftruncate(fd, at)
        for job in jobs:
            job.result()


def header(keys: Mapping[str, object], parts: Sequence[Part]) -> bytes:
    """GGUF version 3 up to the data section, padded."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(parts), len(keys)))
    for key, value in keys.items():
        out += _text(key) + _value(value)
    offset = 0
    for part in parts:
        out += _text(part.name) + struct.pack("<I", len(part.shape))
        out += struct.pack(f"<{len(part.shape)}Q", *part.shape)
        out += struct.pack("<IQ", part.fmt.ggml_type, offset)
        offset += _aligned(part.n_bytes)
    return bytes(out + bytes(-len(out) % ALIGNMENT))


class _Pools:
    """Random blocks by format and spread, drawn when they are first asked for."""

    def __init__(self, seed: int) -> None:
        self._seed, self._pools, self._lock = seed, dict[tuple[str, float], U8](), threading.Lock()

    def get(self, fmt: BlockFormat, std: float) -> U8:
        key = (fmt.name, round(std, 6))
        with self._lock:
            if key not in self._pools:
                rng = np.random.default_rng((self._seed, fmt.ggml_type, int(1e6 * key[1])))
                self._pools[key] = random_blocks(fmt, POOL_BLOCKS, key[1], rng)
            return self._pools[key]


def _write(
    fd: int, at: int, part: Part, n_bytes: int, pools: _Pools, rng: np.random.Generator
) -> None:
    """Write `n_bytes` of a part: its values, or stretches of a pool from random places."""
    if part.make is not None:
        values = np.ascontiguousarray(part.make(rng), np.float32)
        _write_all(fd, values.reshape(-1).view(np.uint8).data, at)
        return
    pool = pools.get(part.fmt, part.std)
    while n_bytes > 0:
        start = int(rng.integers(0, len(pool) // 2))
        stretch = pool[start:].reshape(-1).data[:n_bytes]
        _write_all(fd, stretch, at)
        at, n_bytes = at + len(stretch), n_bytes - len(stretch)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        n_written = os.pwrite(fd, data, at)
        data, at = data[n_written:], at + n_written


def _piece_bytes(part: Part) -> int:
    """Whole blocks of random ones; drawn values in one piece."""
    if part.make is not None:
        return max(part.n_bytes, 1)
    return PIECE_BYTES // part.fmt.block_bytes * part.fmt.block_bytes


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    """A metadata value with its type in front."""
    if not isinstance(value, list):
        type_, raw = _scalar(value)
        return struct.pack("<I", type_) + raw
    items = [_scalar(item) for item in value]
    # Numbers of one array have one type: the wider one, where they differ.
    type_ = max((t for t, _ in items), default=UINT32)
    if type_ == UINT64:
        items = [(UINT64, struct.pack("<Q", int(item))) for item in value]
    return struct.pack("<IIQ", ARRAY, type_, len(value)) + b"".join(raw for _, raw in items)


def _scalar(value: object) -> tuple[int, bytes]:
    match value:
        case bool():
            return BOOL, struct.pack("<?", value)
        case np.uint64():
            return UINT64, struct.pack("<Q", int(value))
        case int() if value >= 1 << 32:
            return UINT64, struct.pack("<Q", value)
        case int():
            return UINT32, struct.pack("<I", value)
        case float():
            return FLOAT32, struct.pack("<f", value)
        case str():
            return STRING, _text(value)
    raise TypeError(f"no GGUF type for {value!r}")
