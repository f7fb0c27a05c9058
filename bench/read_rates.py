"""How fast this machine reads: the GPU its memory, the CPU its own, and the link between them.

What other figures are compared with, measured in the same run: V, M and P of the bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import PackedArguments
from runtime.cuda.device import Device
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.cuda.module import Module
from runtime.cuda.stream import Event, Stream

CHUNK_BYTES = 32 << 10
"""What a block of the kernel reads in one go; sizes are rounded to it."""
THREADS = 256
POOL_BYTES = 1 << 30
"""Reads go around in so much memory, many times what the GPU's cache holds."""
LINK_BYTES = 256 << 20
N_READS = 24
N_TIMES = 7
BLOCKS_A_MULTIPROCESSOR = (2, 4, 8)

U8 = NDArray[np.uint8]


class GPUReads:
    """Times of bare reads of a GPU's memory; a context manager."""

    def __init__(self, device: Device, pool_bytes: int | None = None) -> None:
        """Raises: OutOfDeviceMemory, PtxCompileError, CudaError."""
        pool_bytes = pool_bytes or POOL_BYTES
        self.device, self._pool_bytes = device, pool_bytes
        self._overlapped = device.info.capability >= (9, 0)
        with ExitStack() as resources:
            own = resources.enter_context
            self._pool = own(DeviceBuffer(device, pool_bytes, "read"))
            self._out = own(DeviceBuffer(device, 256, "read result"))
            self.stream = own(Stream(device, "read"))
            self._begin, self._end = own(Event(device, timed=True)), own(Event(device, timed=True))
            self.stream.fill(self._pool.address, 0, pool_bytes)
            module = own(Module(device, read_text(self._overlapped), "read"))
            self._function = module.function("read")
            self._resources = resources.pop_all()
        self._known: dict[int, float] = {}

    def __enter__(self) -> GPUReads:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def microseconds(self, n_bytes: int) -> float:
        """Of a read of about so many bytes, one of several in a row, as a step's kernels are."""
        n_chunks = max(1, min(round(n_bytes / CHUNK_BYTES), self._pool_bytes // CHUNK_BYTES))
        if n_chunks not in self._known:
            most = self.device.info.n_multiprocessors
            grids = {min(n_chunks, most * n) for n in BLOCKS_A_MULTIPROCESSOR}
            self._known[n_chunks] = min(self._measure(n_chunks, grid) for grid in grids)
        return self._known[n_chunks] * n_bytes / (n_chunks * CHUNK_BYTES)

    def bytes_per_second(self) -> float:
        """Of a long read: V."""
        return 1e6 * self._pool_bytes / self.microseconds(self._pool_bytes)

    def _measure(self, n_chunks: int, grid: int) -> float:
        places = self._pool_bytes // (n_chunks * CHUNK_BYTES)
        count = N_READS if n_chunks * CHUNK_BYTES < self._pool_bytes // 4 else 2
        launches = [
            Launch(
                self._function,
                (grid, 1, 1),
                THREADS,
                self._arguments(i % places * n_chunks * CHUNK_BYTES, n_chunks),
                overlapped=self._overlapped,
            )
            for i in range(count)
        ]
        return graph_microseconds(self.stream, launches, self._begin, self._end) / count

    def _arguments(self, offset: int, n_chunks: int) -> PackedArguments:
        values = [self._pool.address + offset, n_chunks, self._out.address]
        return PackedArguments(np.array(values, np.uint64))


def read_text(overlapped: bool) -> str:
    """The kernel's text for launches that do or do not start beside their predecessor."""
    text = Path(__file__).with_name("read.ptx").read_text()
    wait = "    griddepcontrol.wait;\n    griddepcontrol.launch_dependents;" if overlapped else ""
    target = "sm_90" if overlapped else "sm_80"
    return text.replace(".target TARGET", f".target {target}").replace("\nGRID_WAIT", f"\n{wait}")


def graph_microseconds(
    stream: Stream, launches: Sequence[Launch], begin: Event, end: Event
) -> float:
    """GPU time of the launches in a graph: the median of a few."""

    def enqueue() -> None:
        for launch in launches:
            launch.enqueue(stream)

    times = []
    with Graph(stream, enqueue, "timed") as graph:
        for _ in range(N_TIMES):
            stream.record(begin)
            graph.launch(stream)
            stream.record(end)
            stream.synchronize()
            times.append(1e3 * end.milliseconds_since(begin))
    return median(times)


def host_bytes_per_second(pieces: Sequence[U8], n_threads: int) -> float:
    """Reading these pieces of memory once, by so many threads: M, the best of three walks.

    Every thread has its part of each piece, so that Python runs once a part and not all the time.
    """
    n_bytes = sum(len(piece) for piece in pieces)
    parts = [
        [piece[i * len(piece) // n_threads :][: len(piece) // n_threads] for piece in pieces]
        for i in range(n_threads)
    ]

    def read(own: Sequence[U8]) -> None:
        for part in own:
            if len(part):
                part.max()

    with ThreadPoolExecutor(n_threads) as threads:

        def walk() -> None:
            list(threads.map(read, parts))

        return n_bytes / min(_seconds(walk) for _ in range(3))


def link_bytes_per_second(device: Device) -> float:
    """Copies from pinned host memory to the GPU: P, the best of three."""
    n_bytes = LINK_BYTES
    with ExitStack() as resources:
        own = resources.enter_context
        host = own(PinnedBuffer(device, n_bytes, "link"))
        buffer = own(DeviceBuffer(device, n_bytes, "link"))
        stream = own(Stream(device, "link"))

        def copy() -> None:
            stream.upload(buffer.address, host.host, n_bytes)
            stream.synchronize()

        return n_bytes / min(_seconds(copy) for _ in range(3))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
