"""Moving a model's tensors to the GPU, as fast as the file's pages come."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer, RegisteredMemory
from runtime.cuda.stream import Stream
from runtime.errors import PinningFailed
from runtime.models.mapped_file import want_pages
from runtime.models.weights import Weight

PIECE_BYTES = 16 << 20
THREADS = 4
"""Each copies a piece to pinned memory while the others' pieces travel: a copy from the file's map
itself runs at a tenth of the link's rate."""

MAPPED_BYTES = 64 << 20
"""Pages of the file's map are registered in pieces of so many bytes instead, which travel without a
copy: on an H200 registering takes 50 GB/s and giving back 125, where copies of experts took 7."""

LEAST_MAPPED_BYTES = 1 << 20
"""Registering takes 74 us at least."""

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Transfer:
    """Bytes that belong at `address` of the GPU's memory; `data` is u8, contiguous.

    mapped  the bytes are those of a file's shared, read-only map
    """

    address: int
    data: U8
    mapped: bool = False


def transfer_all(
    device: Device, transfers: Sequence[Transfer], moved: Callable[[int], object] = int
) -> int:
    """Carry out all of them.  `moved` gets the bytes of each piece, on the caller's thread.

    Returns how many bytes of a map the driver would not register: they went by way of buffers.
    Raises: PinningFailed, CudaError; whatever `moved` raises.
    """
    registers = device.info.registers_host and device.info.registers_read_only
    pieces = [piece for transfer in transfers for piece in _pieces(transfer, maps=registers)]
    if not pieces:
        return 0
    largest = max(len(piece.data) for piece in pieces)
    with ExitStack() as resources:
        carrier = _Carrier(device, min(largest, PIECE_BYTES), resources)
        threads = ThreadPoolExecutor(min(THREADS, len(pieces)), thread_name_prefix="loading")
        with threads:
            try:
                for n_bytes in threads.map(carrier.carry, pieces):
                    moved(n_bytes)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    return carrier.refused_bytes


def transfer_of(address: int, weight: Weight) -> Transfer:
    """A whole tensor."""
    return Transfer(address, flat(weight.data), mapped=weight.mapped)


def flat(array: NDArray[Any]) -> U8:
    """The array's bytes, not copied where it has no gaps."""
    bytes_: U8 = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return bytes_


class _Carrier:
    """Carries a piece on each thread at a time.

    stage_bytes  of each thread's buffer
    """

    def __init__(self, device: Device, stage_bytes: int, resources: ExitStack) -> None:
        self._device, self._stage_bytes, self._resources = device, stage_bytes, resources
        self._own = local()
        self._refused: list[int] = []

    @property
    def refused_bytes(self) -> int:
        return sum(self._refused)

    def carry(self, piece: Transfer) -> int:
        """Its bytes.  Raises: PinningFailed, CudaError."""
        if not hasattr(self._own, "stream"):
            self._own.stream = self._resources.enter_context(Stream(self._device, "loading"))
        if not (piece.mapped and self._carry_pages(piece)):
            for part in _cut(piece, PIECE_BYTES):
                self._carry_copy(part)
        return len(piece.data)

    def _carry_pages(self, piece: Transfer) -> bool:
        """Whether the driver registered the pages: then they have travelled."""
        want_pages(piece.data.ctypes.data, len(piece.data))
        try:
            pages = RegisteredMemory(self._device, piece.data, "loading", read_only=True)
        except PinningFailed:
            self._refused.append(len(piece.data))
            return False
        with pages:
            self._send(piece, pages.host)
        return True

    def _carry_copy(self, piece: Transfer) -> None:
        if not hasattr(self._own, "stage"):
            buffer = PinnedBuffer(self._device, self._stage_bytes, "staging")
            self._own.stage = self._resources.enter_context(buffer)
        stage: PinnedBuffer = self._own.stage
        stage.view[: len(piece.data)] = piece.data
        self._send(piece, stage.host)

    def _send(self, piece: Transfer, host: int) -> None:
        stream: Stream = self._own.stream
        stream.upload(piece.address, host, len(piece.data))
        stream.synchronize()


def _pieces(transfer: Transfer, *, maps: bool) -> list[Transfer]:
    """Its parts; maps: whole pages of a map apart from what lies beside them, since others may
    register pages that two tensors share."""
    if not (transfer.mapped and maps and len(transfer.data) >= LEAST_MAPPED_BYTES):
        return _cut(replace(transfer, mapped=False), PIECE_BYTES)
    page, end = mmap.PAGESIZE, len(transfer.data)
    first = transfer.data.ctypes.data
    head = min(-first % page, end)
    middle = max(head, end - (first + end) % page)
    beside = [_part(transfer, 0, head), _part(transfer, middle, end)]
    return [
        *_cut(_part(transfer, head, middle), MAPPED_BYTES),
        *(replace(part, mapped=False) for part in beside if len(part.data)),
    ]


def _cut(transfer: Transfer, most: int) -> list[Transfer]:
    edges = [*range(0, len(transfer.data), most), len(transfer.data)]
    return [_part(transfer, a, b) for a, b in pairwise(edges)]


def _part(transfer: Transfer, first: int, end: int) -> Transfer:
    return replace(transfer, address=transfer.address + first, data=transfer.data[first:end])
