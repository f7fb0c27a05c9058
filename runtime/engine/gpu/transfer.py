"""Moving a model's tensors to the GPU, as fast as the file's pages come."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.copies import CopyBatch
from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer, RegisteredMemory
from runtime.cuda.stream import Stream
from runtime.errors import PinningFailed
from runtime.experts.pinned_pages import Span, bytes_at, cut_spans
from runtime.models.mapped_file import want_pages
from runtime.models.weights import Weight

STAGE_BYTES = 16 << 20
THREADS = 4
"""Each fills its buffer of pinned memory while the others' travel: a copy from the file's map
itself runs at a tenth of the link's rate."""

MAPPED_BYTES = 64 << 20
"""Pages of the file's map are registered in pieces of so many bytes instead, which travel without a
copy: on an H200 registering takes 50 GB/s and giving back 125, where copies of experts took 7."""

LEAST_MAPPED_BYTES = 1 << 20
"""Registering takes 74 us at least."""

GAP_BYTES = 64 << 10
"""Between tensors that are registered together: each of the half dozen calls for a piece may wait
for the interpreter, and a layer has a dozen tensors."""

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Transfer:
    """Bytes that belong at `address` of the GPU's memory; `data` is u8, contiguous.

    mapped  the bytes are those of a file's shared, read-only map
    """

    address: int
    data: U8
    mapped: bool = False

    @property
    def span(self) -> Span:
        """Where the bytes are in the host's memory."""
        start = self.data.ctypes.data
        return start, start + len(self.data)


@dataclass(frozen=True)
class Refused:
    """What the driver would not do, so that bytes travelled in a slower way.

    pages_bytes  of a map whose pages it did not register: they went by way of buffers
    batches      why it did not take many copies by one call; empty: it did
    """

    pages_bytes: int = 0
    batches: str = ""


@dataclass(frozen=True)
class _Load:
    """What travels together; all of it lies in `pages`, if those are to be registered."""

    transfers: list[Transfer]
    pages: Span | None = None

    @property
    def n_bytes(self) -> int:
        return sum(len(transfer.data) for transfer in self.transfers)


def transfer_all(
    device: Device, transfers: Sequence[Transfer], moved: Callable[[int], object] = int
) -> Refused:
    """Carry out all of them.  `moved` gets the bytes of each piece, on the caller's thread.

    Raises: PinningFailed, CudaError; whatever `moved` raises.
    """
    registers = device.info.registers_host and device.info.registers_read_only
    loads = _loads([t for t in transfers if len(t.data)], maps=registers)
    if not loads:
        return Refused()
    with ExitStack() as resources:
        carrier = _Carrier(device, min(max(load.n_bytes for load in loads), STAGE_BYTES), resources)
        threads = ThreadPoolExecutor(min(THREADS, len(loads)), thread_name_prefix="loading")
        with threads:
            try:
                for n_bytes in threads.map(carrier.carry, loads):
                    moved(n_bytes)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    return carrier.refused


def transfer_of(address: int, weight: Weight) -> Transfer:
    """A whole tensor."""
    return Transfer(address, flat(weight.data), mapped=weight.mapped)


def flat(array: NDArray[Any]) -> U8:
    """The array's bytes, not copied where it has no gaps."""
    bytes_: U8 = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return bytes_


class _Carrier:
    """Carries a load on each thread at a time.

    stage_bytes  of each thread's buffer
    """

    def __init__(self, device: Device, stage_bytes: int, resources: ExitStack) -> None:
        self._device, self._stage_bytes, self._resources = device, stage_bytes, resources
        self._own = local()
        self._refused_pages: list[int] = []
        self._refused_batches: list[str] = []

    @property
    def refused(self) -> Refused:
        return Refused(sum(self._refused_pages), next(iter(self._refused_batches), ""))

    def carry(self, load: _Load) -> int:
        """Its bytes.  Raises: PinningFailed, CudaError."""
        with self._device.staying():
            self._carry(load)
        return load.n_bytes

    def _carry(self, load: _Load) -> None:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._resources.enter_context(Stream(self._device, "loading"))
            self._own.copies = CopyBatch(self._own.stream, tell=self._refused_batches.append)
        if load.pages is None or not self._carry_pages(load, load.pages):
            for part in _stage_loads(load.transfers, self._stage_bytes):
                self._carry_copies(part.transfers)

    def _carry_pages(self, load: _Load, pages: Span) -> bool:
        """Whether the driver registered them: then the load has travelled."""
        start, end = pages
        want_pages(start, end - start)
        try:
            registered = RegisteredMemory(
                self._device, bytes_at(start, end - start), "loading", read_only=True
            )
        except PinningFailed:
            self._refused_pages.append(load.n_bytes)
            return False
        with registered:
            self._send(load.transfers, [transfer.span[0] for transfer in load.transfers])
        return True

    def _carry_copies(self, transfers: Sequence[Transfer]) -> None:
        """By way of the buffer, which has room for them."""
        if not hasattr(self._own, "stage"):
            buffer = PinnedBuffer(self._device, self._stage_bytes, "staging")
            self._own.stage = self._resources.enter_context(buffer)
        stage: PinnedBuffer = self._own.stage
        hosts, at = [], 0
        for transfer in transfers:
            stage.view[at : at + len(transfer.data)] = transfer.data
            hosts.append(stage.host + at)
            at += len(transfer.data)
        self._send(transfers, hosts)

    def _send(self, transfers: Sequence[Transfer], hosts: Sequence[int]) -> None:
        """Copy each from where it is pinned."""
        copies: CopyBatch = self._own.copies
        copies.upload(
            [(t.address, host, len(t.data)) for t, host in zip(transfers, hosts, strict=True)]
        )
        self._own.stream.synchronize()


def _loads(transfers: Sequence[Transfer], *, maps: bool) -> list[_Load]:
    """All bytes once, in loads of about equal size; maps: pages of maps are to be registered."""
    mapped = [transfer for transfer in transfers if transfer.mapped and maps]
    others = [transfer for transfer in transfers if not (transfer.mapped and maps)]
    windows = _windows(transfer.span for transfer in mapped)
    inside: list[list[Transfer]] = [[] for _ in windows]
    for transfer in mapped:
        for part, window in _cut_at(transfer, windows):
            (others if window is None else inside[window]).append(part)
    pages = [_Load(parts, pages) for parts, pages in zip(inside, windows, strict=True)]
    return [*pages, *_stage_loads(others, STAGE_BYTES)]


def _windows(spans: Iterable[Span]) -> list[Span]:
    """Whole pages that hold nothing beside these spans but what lies between two of them; others
    may register a page that the first or last tensor shares with its neighbour."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    page = mmap.PAGESIZE
    whole = [(-(-start // page) * page, end // page * page) for start, end in joined]
    cut = cut_spans(whole, MAPPED_BYTES)
    return [(start, end) for start, end in cut if end - start >= LEAST_MAPPED_BYTES]


def _cut_at(transfer: Transfer, windows: Sequence[Span]) -> Iterator[tuple[Transfer, int | None]]:
    """Its parts, each with the index of the window that it lies in, or None."""
    first, end = transfer.span
    at = first
    while at < end:
        index = bisect_right(windows, at, key=lambda window: window[0]) - 1
        if index >= 0 and at < windows[index][1]:
            stop, window = windows[index][1], index
        else:
            following = windows[index + 1][0] if index + 1 < len(windows) else end
            stop, window = following, None
        stop = min(stop, end)
        yield _part(transfer, at - first, stop - first), window
        at = stop


def _stage_loads(transfers: Sequence[Transfer], most: int) -> list[_Load]:
    """The same bytes in loads of at most `most`."""
    loads, room = [_Load([])], most
    for transfer in transfers:
        first, end = 0, len(transfer.data)
        while first < end:
            if not room:
                loads.append(_Load([]))
                room = most
            stop = min(first + room, end)
            loads[-1].transfers.append(_part(transfer, first, stop))
            first, room = stop, room - (stop - first)
    return [load for load in loads if load.transfers]


def _part(transfer: Transfer, first: int, end: int) -> Transfer:
    return replace(transfer, address=transfer.address + first, data=transfer.data[first:end])
