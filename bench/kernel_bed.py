"""What a kernel is timed on: a GPU's memory with plain weights in it, and graphs of launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.kernels import random_matrix
from ops.gpu.kernel import Kernel, format_table
from ops.gpu.row_launch import Multiprocessors
from ops.quants import BlockFormat
from runtime.cuda.device import Device
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.module import CubinCache, Function, Module
from runtime.cuda.resource import Resource
from runtime.cuda.stream import Event, Stream

POOL_BYTES = 512 << 20
"""Of weights that launches take in turn: ten times what an H200's cache holds."""

TURNS, MOST_TURNS = 24, 256
"""Launches, or pairs, of a graph: as many as read `COLD_BYTES`, within these bounds."""

COLD_BYTES = 192 << 20
"""So many bytes apart nothing is left in a GPU's cache."""


R = TypeVar("R", bound=Resource)


@dataclass(frozen=True)
class Work:
    """Launches of one kernel, or of some that follow each other, over and over.

    turns      the launches of each turn
    n_bytes    weights of a turn that are multiplied
    n_vectors  that they are multiplied with
    """

    shape: str
    n_vectors: int
    n_bytes: int
    turns: Sequence[Sequence[Launch]]


class Bed:
    """Memory, functions and a stream; a context manager that releases them."""

    def __init__(self, device: Device, repeats: int = 11) -> None:
        self.device, self._repeats = device, repeats
        self.overlapped = device.info.capability >= (9, 0)
        self._resources = ExitStack()
        self._functions: dict[str, Function] = {}
        self._cache = CubinCache()
        self._stream = self._own(Stream(device, "kernels"))
        self._begin = self._own(Event(device, timed=True))
        self._end = self._own(Event(device, timed=True))

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def multiprocessors(self) -> Multiprocessors:
        info = self.device.info
        return Multiprocessors(info.n_multiprocessors, info.block_shared_bytes)

    def place(self, array: NDArray[np.generic]) -> int:
        """The address of a copy of the array."""
        values = np.ascontiguousarray(array)
        buffer = self._own(DeviceBuffer(self.device, max(values.nbytes, 1), "placed"))
        self._stream.upload(buffer.address, values.ctypes.data, values.nbytes)
        self._stream.synchronize()
        return buffer.address

    def zeros(self, n_bytes: int) -> int:
        """The address of so many zero bytes."""
        buffer = self._own(DeviceBuffer(self.device, n_bytes, "zeros"))
        self._stream.fill(buffer.address, 0, n_bytes)
        return buffer.address

    def weights(self, parts: Sequence[tuple[BlockFormat, int, int]]) -> list[list[int]]:
        """Addresses of the matrices (format, values a row, rows), as many copies as the pool has.

        Each copy's matrices lie one after another.
        """
        images = [_image(fmt, n, n_rows) for fmt, n, n_rows in parts]
        starts = np.cumsum([0, *(image.nbytes for image in images)])
        n_copies = max(1, POOL_BYTES // int(starts[-1]))
        buffer = self._own(DeviceBuffer(self.device, n_copies * int(starts[-1]), "weights"))
        image = np.concatenate(images)
        addresses = []
        for copy in range(n_copies):
            at = buffer.address + copy * int(starts[-1])
            self._stream.upload(at, image.ctypes.data, image.nbytes)
            addresses.append([at + int(start) for start in starts[:-1]])
        self._stream.synchronize()
        return addresses

    @staticmethod
    def turns(n_bytes: int) -> int:
        """Turns of a graph each of which reads so many bytes of weights."""
        return min(max(-(-COLD_BYTES // n_bytes), TURNS), MOST_TURNS)

    def grid_table(self, fmt: BlockFormat) -> int:
        """Address of the format's grid; 0 where it has none."""
        table = format_table(fmt)
        return self.place(table) if table.nbytes else 0

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: Mapping[str, float],
        shared_bytes: int = 0,
    ) -> Launch:
        """A launch as a step has it. Raises: CudaError, PtxCompileError."""
        if kernel.text_hash not in self._functions:
            module = self._own(Module(self.device, kernel.text, kernel.entry, self._cache))
            self._functions[kernel.text_hash] = module.function(kernel.entry)
        function = self._functions[kernel.text_hash]
        function.allow_shared_bytes(shared_bytes)
        x, y, z = (*grid, 1, 1)[:3]
        packed = kernel.pack(**arguments)
        return Launch(
            function,
            (x, y, z),
            kernel.block,
            packed,
            shared_bytes=shared_bytes,
            overlapped=self.overlapped,
        )

    def microseconds(self, work: Work) -> list[float]:
        """GPU time of a turn, in each of the runs after one that does not count."""

        def enqueue() -> None:
            for turn in work.turns:
                for launch in turn:
                    launch.enqueue(self._stream)

        runs = []
        with Graph(self._stream, enqueue, work.shape) as graph:
            for _ in range(self._repeats + 1):
                self._stream.record(self._begin)
                graph.launch(self._stream)
                self._stream.record(self._end)
                self._stream.synchronize()
                runs.append(1e3 * self._end.milliseconds_since(self._begin) / len(work.turns))
        return runs[1:]

    def _own(self, resource: R) -> R:
        self._resources.enter_context(resource)
        return resource


def _image(fmt: BlockFormat, n: int, n_rows: int) -> NDArray[np.uint8]:
    """Rows of plain blocks, the end rounded up to 256 bytes as where a model's tensors lie."""
    few = random_matrix(fmt, n, 0)
    content = np.resize(few, (n_rows, fmt.row_bytes(n))).reshape(-1)
    padded = np.zeros(-(-content.nbytes // 256) * 256, np.uint8)
    padded[: content.nbytes] = content
    return padded
