"""Runs PTX text on a GPU, if there is one, to hold the interpreter against it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.frame import DTYPES
from tests.support.ptx.snippet import Snippet


class Device:
    """The first GPU's primary context."""

    def __init__(self, driver: Any, context: Any) -> None:
        self.driver = driver
        self.context = context

    def call(self, name: str, *args: Any) -> Any:
        code, *values = getattr(self.driver, name)(*args)
        if int(code) != 0:
            raise RuntimeError(f"{name}: {code.name}")
        return values[0] if len(values) == 1 else values

    def evaluate(self, snippet: Snippet) -> NDArray[Any]:
        """What `Snippet.interpret` returns, from the GPU. Text goes in with its line markers."""
        result = np.zeros(snippet.n, DTYPES[snippet.out])
        arrays = [result, *map(np.ascontiguousarray, snippet.arrays())]
        module = self.call("cuModuleLoadData", snippet.text.encode() + b"\0")
        kernel = self.call("cuModuleGetFunction", module, b"snippet")
        addresses = []
        for array in arrays:
            addresses.append(self.call("cuMemAlloc", array.nbytes))
            self.call("cuMemcpyHtoD", addresses[-1], array, array.nbytes)
        values = (int(addresses[0]), snippet.n, *map(int, addresses[1:]))
        types = (ctypes.c_uint64, ctypes.c_uint32, *[ctypes.c_uint64] * (len(arrays) - 1))
        grid = -(-snippet.n // snippet.block)
        self.call(
            "cuLaunchKernel", kernel, grid, 1, 1, snippet.block, 1, 1, 0, 0, (values, types), 0
        )
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH", result, addresses[0], result.nbytes)
        for address in addresses:
            self.call("cuMemFree", address)
        self.call("cuModuleUnload", module)
        return result


def find_device() -> Device | None:
    """The first GPU, or None where no binding, driver or device exists."""
    try:
        from cuda.bindings import driver

        if int(driver.cuInit(0)[0]) != 0 or int(driver.cuDeviceGetCount()[1]) == 0:
            return None
    except (ImportError, RuntimeError):
        return None
    device = Device(driver, None)
    gpu = device.call("cuDeviceGet", 0)
    device.context = device.call("cuDevicePrimaryCtxRetain", gpu)
    device.call("cuCtxSetCurrent", device.context)
    return device
