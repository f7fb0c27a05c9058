"""Where a kernel of `ops.gpu` runs in a test: in the interpreter, or on a GPU.

Both take the same calls, so that one case checks the text in CI and its assembled code on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ops.gpu.kernel import Kernel
from runtime.cuda.device import Device
from runtime.cuda.graph import Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.module import CubinCache, Function, Module
from runtime.cuda.stream import Stream
from tests.support import ptx as interpreter

Array = NDArray[Any]
Grid = tuple[int, ...]


class DoesNotFit(Exception):
    """A block asks for more shared memory than this GPU has: another launch is chosen there."""


class Machine(Protocol):
    """Memory, and kernels that run over it one after the other."""

    def place(self, array: Array, *, writable: bool = True) -> int:
        """The address of a copy of `array`, aligned to 256 bytes."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Mapping[str, float],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Run the kernel over the grid; blocks have `kernel.block` threads."""
        ...

    def read(self, address: int, dtype: DTypeLike, shape: int | Sequence[int]) -> Array:
        """What lies at the address after all launches."""
        ...


class InterpretedMachine:
    """The interpreter of PTX text.

    text   replaces the text of every kernel that is launched (for mutations)
    host   plays the CPU whenever all threads poll
    """

    def __init__(
        self,
        *,
        text: str | None = None,
        host: Callable[[], None] | None = None,
        n_bytes: int = 1 << 26,
    ) -> None:
        self.memory = interpreter.Memory(n_bytes)
        self.loaded: dict[str, interpreter.Kernel] = {}
        self._text, self._host = text, host

    def place(self, array: Array, *, writable: bool = True) -> int:
        return self.memory.place(array, writable=writable)

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Mapping[str, float],
        *,
        shared_bytes: int = 0,
    ) -> None:
        if kernel.text not in self.loaded:
            module = interpreter.load(self._text or kernel.text, kernel.entry)
            self.loaded[kernel.text] = module[kernel.entry]
        values = [
            np.float32(arguments[name]) if type_ == "f32" else int(arguments[name])
            for name, type_ in kernel.params
        ]
        if len(values) != len(arguments):
            raise TypeError(f"{kernel.entry} takes {[name for name, _ in kernel.params]}")
        self.loaded[kernel.text].launch(
            self.memory,
            grid,
            (kernel.block,),
            [float(v) if isinstance(v, np.float32) else v for v in values],
            dynamic_shared=shared_bytes,
            host=self._host,
        )

    def read(self, address: int, dtype: DTypeLike, shape: int | Sequence[int]) -> Array:
        return self.memory.read(address, dtype, shape)


class DeviceMachine:
    """A GPU; everything placed is released by `clear`."""

    def __init__(self, device: Device, cache: CubinCache | None = None) -> None:
        self.device = device
        self.stream = Stream(device, "test")
        self._cache = cache
        self._functions: dict[str, Function] = {}
        self._buffers: list[DeviceBuffer] = []

    def place(self, array: Array, *, writable: bool = True) -> int:
        values = np.ascontiguousarray(array)
        buffer = DeviceBuffer(self.device, max(1, values.nbytes), "placed")
        self._buffers.append(buffer)
        if values.nbytes:
            self.stream.upload(buffer.address, values.ctypes.data, values.nbytes)
            self.stream.synchronize()
        return buffer.address

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Mapping[str, float],
        *,
        shared_bytes: int = 0,
    ) -> None:
        launch = self.prepare(kernel, grid, arguments, shared_bytes=shared_bytes)
        launch.enqueue(self.stream)
        self.stream.synchronize()

    def prepare(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Mapping[str, float],
        *,
        shared_bytes: int = 0,
        overlapped: bool = False,
    ) -> Launch:
        """A launch that can be enqueued again and again, for timing."""
        if kernel.text_hash not in self._functions:
            module = Module(self.device, kernel.text, kernel.entry, self._cache)
            self._functions[kernel.text_hash] = module.function(kernel.entry)
        function = self._functions[kernel.text_hash]
        if shared_bytes > self.device.info.block_shared_bytes:
            raise DoesNotFit(f"{kernel.entry} asks for {shared_bytes} bytes of shared memory")
        function.allow_shared_bytes(shared_bytes)
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(
            function,
            (x, y, z),
            kernel.block,
            kernel.pack(**arguments),
            shared_bytes=shared_bytes,
            overlapped=overlapped,
        )

    def read(self, address: int, dtype: DTypeLike, shape: int | Sequence[int]) -> Array:
        result = np.empty(shape, dtype)
        self.stream.download(result.ctypes.data, address, result.nbytes)
        self.stream.synchronize()
        return result

    def clear(self) -> None:
        """Release what was placed."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
