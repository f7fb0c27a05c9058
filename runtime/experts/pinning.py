"""Pinning: registers host memory piece by piece, on a thread, while the engine serves from it.

What to register, and in which order, is `pieces`: the most used experts first.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.memory import RegisteredMemory
from runtime.errors import DeviceError, PinningFailed
from runtime.experts.host_memory import HostMemory, MemoryReading
from runtime.experts.pinned_pages import I64, Span, bytes_at, cut_spans
from runtime.models.mapped_file import want_pages
from runtime.progress import Progress

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Driver calls of other threads wait for a piece or two. On an H200 registering in pieces of 16, 64
and 256 MiB ran at 21, 50 and 37 GB/s, and a graph's launch beside it took 0.05, 0.9 and up to 8 ms.
One thread is enough: four were no quicker."""

SLOW_RATE = 2e9
"""Bytes a second. What is slower comes from a disk: then the next pieces are asked for ahead."""

PIECES_AHEAD = 8

PUBLISH_SECONDS = 0.02
LOOK_SECONDS = 0.1
"""Between looks at the machine's memory."""

SAY_SECONDS = 5.0
"""Between lines of the log."""

SWAP_BYTES = 64 << 20
"""So much written to swap while pinning: it takes what others need."""

SHARE_OF_TOO_LITTLE = 0.7
"""Of what may be pinned, where experts do not fit: the rest keeps the pages of the others."""


class Pinning:
    """Registers spans in their order, on a thread, where the first one can be.

    publish  gets the spans that are new since its last call, on the thread
    tell     gets the reason where it ends early, on the thread
    memory   asked now and then whether there is room for more
    why      None: everything is pinned or still will be; else why not all of it is
    """

    def __init__(
        self,
        device: Device,
        spans: Sequence[Span],
        publish: Callable[[list[Span]], None],
        memory: HostMemory,
        tell: Callable[[str], object] = logger.warning,
    ) -> None:
        self._device, self._publish, self._memory, self._tell = device, publish, memory, tell
        self._spans = list(spans)
        self._pieces: list[RegisteredMemory] = []
        self._new: list[Span] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._first = memory.read()
        self.why: str | None = None
        self.progress = Progress()
        self.n_bytes = 0
        """Registered so far."""
        self.seconds = 0.0
        """Spent so far."""

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def bytes_per_second(self) -> float:
        return self.n_bytes / self.seconds if self.seconds else 0.0

    def start(self) -> bool:
        """Register the first piece, which shows whether it is possible, and the others on a thread.

        False: impossible, `why` tells.  Raises: DeviceLost.
        """
        total = sum(end - start for start, end in self._spans)
        self.progress.start("pinning experts", total >> 20, "MiB")
        first, rest = self._spans[:1], self._spans[1:]
        try:
            for span in first:
                self._register(span)
        except PinningFailed as error:
            self._end(str(error))
            self.close()
            return False
        self._show()
        logger.info("pinning %.1f GiB of experts in the background", total / 2**30)
        self._thread = threading.Thread(
            target=self._run, args=(rest,), name="pinning experts", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most so long; whether it has ended."""
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Stop, and unregister everything; no copy and no step that reads it may be in flight."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        while self._pieces:
            self._pieces.pop().close()
        self.n_bytes = 0

    def _run(self, spans: Sequence[Span]) -> None:
        try:
            with self._device.staying():
                why = self._register_all(spans)
            self._end(why)
        except DeviceError as error:
            self._end(str(error))
        except BaseException as error:
            logger.exception("pinning has failed")
            self._end(repr(error))

    def _register_all(self, spans: Sequence[Span]) -> str | None:
        """Why it ended before all was registered."""
        shown = looked = said = now = time.monotonic()
        asked = 0
        for index, span in enumerate(spans):
            if self._stopping.is_set():
                return "closed"
            began = now
            self._register(span)
            now = time.monotonic()
            if span[1] - span[0] < SLOW_RATE * (now - began):
                asked = max(asked, index + 1)
                for start, end in spans[asked : index + 1 + PIECES_AHEAD]:
                    want_pages(start, end - start)
                    asked += 1
            if now - shown >= PUBLISH_SECONDS:
                self._show()
                shown = now
            if now - said >= SAY_SECONDS:
                logger.info("%.1f GiB of experts are pinned so far", self.n_bytes / 2**30)
                said = now
            if now - looked >= LOOK_SECONDS:
                looked = now
                reason = self._obstacle()
                if reason is not None:
                    return reason
        return None

    def _register(self, span: Span) -> None:
        """Raises: PinningFailed, DeviceLost."""
        began = time.monotonic()
        start, end = span
        pages = bytes_at(start, end - start)
        piece = RegisteredMemory(self._device, pages, "experts", read_only=True)
        self._pieces.append(piece)
        if len(self._pieces) == 1 and piece.address != start:  # it is the machine's way, or not
            raise PinningFailed(end - start, "kernels would see it at another address")
        self._new.append(span)
        self.n_bytes += end - start
        self.seconds += time.monotonic() - began
        self.progress.advance((end - start) >> 20)

    def _obstacle(self) -> str | None:
        """Why no more may be pinned, if that is so."""
        now = self._memory.read()
        if now is None or self._first is None:
            return None
        if now.swapped_out - self._first.swapped_out >= SWAP_BYTES:
            return "the system began to swap"
        if now.room(self.n_bytes) == 0:
            return f"only {now.available / 2**30:.1f} GiB of the machine's memory are free"
        return None

    def _show(self) -> None:
        if self._new:
            new, self._new = self._new, []
            self._publish(new)

    def _end(self, why: str | None) -> None:
        self._show()
        self.why = why
        self.progress.finish("pinned" if why is None else f"pinned in part: {why}")
        gib, rate = self.n_bytes / 2**30, self.bytes_per_second / 1e9
        if why is None:
            logger.info("pinned %.1f GiB of experts, %.1f GB/s", gib, rate)
        elif not self._stopping.is_set():
            self._tell(f"{gib:.1f} GiB of experts are pinned, not all: {why}")
        self._ended.set()


def pinnable(reading: MemoryReading | None, n_bytes: int) -> int:
    """Of n_bytes, how many are to be pinned; all where the machine does not tell its memory."""
    room = n_bytes if reading is None else reading.room(0)
    return n_bytes if n_bytes <= room else int(SHARE_OF_TOO_LITTLE * room)


def pieces(starts: I64, ends: I64, heat: NDArray[np.float64], most: int) -> list[Span]:
    """Spans of whole pages to register, at most about `most` bytes, the hottest first.

    starts, ends  [n_experts, 3]: where each expert's matrices lie; equal where there is none
    heat          [n_experts]: how often each is used
    """
    there = ends > starts
    if int((ends - starts)[there].sum()) > most:
        page = mmap.PAGESIZE
        sizes = np.where(there, ends - starts + 2 * page, 0).sum(axis=1)
        order = np.argsort(-heat / np.maximum(sizes, 1), kind="stable")
        taken = order[np.cumsum(sizes[order]) <= most]
        starts, ends, heat = starts[taken], ends[taken], heat[taken]
        there = ends > starts
    cut = cut_spans(_whole_pages(starts[there], ends[there]), PIECE_BYTES)
    edges = np.array(cut, np.int64).reshape(-1, 2)
    uses = _uses_up_to(starts, ends, heat, edges)
    density = (uses[:, 1] - uses[:, 0]) / np.maximum(edges[:, 1] - edges[:, 0], 1)
    return [cut[i] for i in np.argsort(-density, kind="stable")]


def _whole_pages(starts: I64, ends: I64) -> list[Span]:
    """The pages of all of these spans, those together that touch; there are many thousands."""
    page = mmap.PAGESIZE
    order = np.argsort(starts, kind="stable")
    firsts = starts[order] // page * page
    reached = np.maximum.accumulate(-(-ends[order] // page) * page)
    apart = np.flatnonzero(firsts[1:] > reached[:-1]) + 1
    at = np.concatenate([[0], apart])[: len(order)]
    lasts = np.concatenate([apart, [len(order)]])[: len(at)] - 1
    return list(zip(firsts[at].tolist(), reached[lasts].tolist(), strict=True))


def _uses_up_to(
    starts: I64, ends: I64, heat: NDArray[np.float64], addresses: I64
) -> NDArray[np.float64]:
    """Uses of all bytes below each address: a matrix's uses are spread evenly over its bytes."""
    there = ends > starts
    shares = np.broadcast_to(heat[:, None], starts.shape)[there]
    order = np.argsort(starts[there], kind="stable")
    edges = np.stack([starts[there][order], ends[there][order]], axis=1)
    summed = np.concatenate([[0.0], np.cumsum(shares[order])])
    levels = np.stack([summed[:-1], summed[1:]], axis=1)
    if not len(edges):
        return np.zeros(addresses.shape)
    found = np.interp(addresses, edges.reshape(-1), levels.reshape(-1))
    return np.asarray(found, np.float64)
