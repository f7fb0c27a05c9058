"""Functions: the code of every kernel that a step may use, loaded before the first one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ops.gpu.kernel import Kernel
from runtime.cuda.device import Device
from runtime.cuda.module import CubinCache, Function, Module

THREADS = 8
"""Assembling a text takes 10 to 200 ms of one thread."""


KernelKey = tuple[object, ...]


def key_of(kernel: Kernel) -> KernelKey:
    """What tells the texts of kernels apart, without expanding them."""
    return (kernel.entry, kernel.source, *kernel.defines.items())


class Functions:
    """Kernels' functions on one device; closing unloads them."""

    def __init__(self, device: Device, cache: CubinCache | None = None) -> None:
        self._device, self._cache = device, cache
        self._functions: dict[KernelKey, Function] = {}

    def load(self, kernels: Iterable[Kernel], loaded: Callable[[], object] = int) -> None:
        """Assemble or read from the cache what is not loaded yet, several at a time.

        loaded  called on this thread after each

        Raises: PtxCompileError, CudaError; whatever `loaded` raises.
        """
        missing = {key_of(k): k for k in kernels if key_of(k) not in self._functions}
        n_threads = min(THREADS, os.cpu_count() or 1, max(len(missing), 1))
        with ThreadPoolExecutor(n_threads, thread_name_prefix="assembling") as threads:
            try:
                for _ in threads.map(self._load, missing.items()):
                    loaded()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def function(self, kernel: Kernel, shared_bytes: int = 0) -> Function:
        """The loaded function, allowed that much dynamic shared memory.

        Raises: KeyError if it was not loaded, CudaError for more than a multiprocessor has.
        """
        function = self._functions[key_of(kernel)]
        function.allow_shared_bytes(shared_bytes)
        return function

    def __len__(self) -> int:
        return len(self._functions)

    def close(self) -> None:
        for function in self._functions.values():
            function.module.close()
        self._functions.clear()

    def _load(self, item: tuple[KernelKey, Kernel]) -> None:
        key, kernel = item
        with self._device.staying():
            module = Module(
                self._device, lambda: kernel.text, kernel.entry, self._cache, recipe=kernel.recipe
            )
            try:
                self._functions[key] = module.function(kernel.entry)
            except BaseException:
                module.close()
                raise
