"""The only file that talks to the CUDA driver, through cuda-python's bindings.

Every call passes `Driver.call`, so every failure is one of the errors in runtime.errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from runtime.errors import CudaError, DeviceError, DeviceLost, DeviceUnavailable, OutOfDeviceMemory

PTX_CUDA = (12, 0)
"""The first CUDA version whose drivers assemble PTX ISA 8.0, in which the kernels are written."""

PTX_VERSION = 1000 * PTX_CUDA[0] + 10 * PTX_CUDA[1]
"""The same as the driver writes it."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY, as the driver's functions return it."""

DRIVER_BRANCHES = {12: "525", 13: "580"}
"""The first NVIDIA driver branch that is made for a major version of CUDA."""

LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "LAUNCH_FAILED"),
        *("ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
        *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "CONTEXT_IS_DESTROYED"),
        *("EXTERNAL_DEVICE", "TENSOR_MEMORY_LEAK"),
    )
)
"""Codes after which every call of the process's context fails alike."""

EXPLANATIONS = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible to this process; see CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda is the toolkit's stub; put the real driver's folder first",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel's NVIDIA module differ; reboot",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, or wait until it has started",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds the GPU in exclusive mode",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code was assembled for another GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the PTX; update the driver",
    "CUDA_ERROR_INVALID_CONTEXT": "the device was closed, or this thread has none",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block needs more registers or shared memory than "
    "a multiprocessor has",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display's watchdog allows; "
    "use a GPU without a display",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory that is not its own; restart, and "
    "please report it",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel crashed; restart, and please report it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is damaged; reset or replace it",
}
"""What a person can do about a code; others get the driver's own words."""


class Driver:
    """The driver's functions behind one gate.

    `api` is the module `cuda.bindings.driver`, or anything with the same names; `version` is the
    driver's CUDA version as the driver writes it: 13000 for 13.0.
    """

    def __init__(self, api: Any, version: int) -> None:
        self.api = api
        self.version = version

    def call(self, name: str, *args: Any) -> Any:
        """Call the driver's function `name`; its results, unwrapped where there is only one.

        Raises: OutOfDeviceMemory, DeviceLost, CudaError; DeviceUnavailable if the driver lacks it.
        """
        try:
            code, *values = getattr(self.api, name)(*args)
        except RuntimeError as error:
            raise self._lacking(name) from error
        if code:
            raise self._error(name, code)
        return values[0] if len(values) == 1 else tuple(values)

    def ready(self, name: str, *args: Any) -> bool:
        """Ask the driver's function `name` whether work has ended; True: it has.

        That it has not costs no more: no error is made of it.  Raises: as `call`.
        """
        try:
            code = getattr(self.api, name)(*args)[0]
        except RuntimeError as error:
            raise self._lacking(name) from error
        if code and code.name != "CUDA_ERROR_NOT_READY":
            raise self._error(name, code)
        return not code

    def native(self, name: str, n_args: int, version: int = PTX_VERSION) -> Callable[..., int]:
        """The driver's own function, as that version of CUDA has it: it takes numbers, handles and
        addresses among them, and returns a code, for `passed`.

        For what every token calls: the bindings take as long as the driver to make arguments, and
        more beside workers that read weights.  It keeps Python's lock, as it does not wait.
        Raises: CudaError, DeviceUnavailable for one that the driver lacks.
        """
        address, _ = self.call("cuGetProcAddress", name.encode(), version, 0)
        if not address:
            raise self._lacking(name)
        return ctypes.PYFUNCTYPE(ctypes.c_int, *n_args * [ctypes.c_uint64])(int(address))

    def passed(self, name: str, code: int) -> bool:
        """Whether a native call has succeeded; False: it says that work has not ended.

        Raises: as `call`.
        """
        if code and code != NOT_READY:
            raise self._error(name, self.api.CUresult(code))
        return not code

    def _lacking(self, name: str) -> DeviceUnavailable:
        """The bindings found no such function in libcuda."""
        return DeviceUnavailable(
            f"this NVIDIA driver (CUDA {_dotted(self.version)}) lacks {name}: update the driver"
        )

    def _error(self, call: str, code: Any) -> CudaError:
        if code.name == "CUDA_ERROR_OUT_OF_MEMORY":
            return OutOfDeviceMemory(call, None, None)
        kind = DeviceLost if code.name in LOST else CudaError
        explanation = EXPLANATIONS.get(code.name)
        if explanation is None:
            found, text = self.api.cuGetErrorString(code)
            explanation = text.decode() if int(found) == 0 else f"code {int(code)}"
        return kind(call, code.name, explanation)


def open_driver() -> Driver:
    """The machine's driver, initialized.

    Raises: DeviceUnavailable, in one sentence, where the bindings, the driver or a GPU is missing,
        or where the driver is too old.
    """
    try:
        import cuda.bindings
        from cuda.bindings import driver as api
    except ImportError as error:
        raise DeviceUnavailable(f"cuda-python is not usable here ({error})") from error
    return initialized(api, cuda.bindings.__version__)


def initialized(api: Any, bindings_version: str) -> Driver:
    """The driver behind `api`, once it is known to be new enough. Raises: as `open_driver`."""
    try:
        code, version = api.cuDriverGetVersion()
    except RuntimeError as error:  # the bindings' own "no libcuda found"
        raise DeviceUnavailable("no NVIDIA driver (libcuda) on this machine") from error
    if int(code) != 0:
        raise DeviceUnavailable(f"no NVIDIA driver can be used here ({code.name})")
    driver = Driver(api, int(version))
    needed = max(PTX_CUDA, (int(bindings_version.split(".")[0]), 0))
    if driver.version < needed[0] * 1000 + needed[1] * 10:
        branch = DRIVER_BRANCHES.get(needed[0])
        or_newer = f", driver {branch} or newer" if branch else ""
        raise DeviceUnavailable(
            f"the NVIDIA driver is too old: it supports CUDA {_dotted(driver.version)}, and "
            f"cuda-bindings {bindings_version} with PTX 8.0 needs "
            f"{needed[0]}.{needed[1]}{or_newer}"
        )
    try:
        driver.call("cuInit", 0)
    except CudaError as error:
        raise DeviceUnavailable(f"{error.explanation} ({error.code})") from error
    return driver


def device_names() -> tuple[str, ...]:
    """The names of this machine's NVIDIA GPUs, in the driver's order.

    Raises: DeviceUnavailable, in one sentence, where there is no binding, driver or device.
    """
    driver = open_driver()
    try:
        return tuple(device_name(driver, index) for index in range(driver.call("cuDeviceGetCount")))
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error


def device_name(driver: Driver, index: int) -> str:
    """The name of the GPU at `index`. Raises: CudaError."""
    raw: bytes = driver.call("cuDeviceGetName", 128, driver.call("cuDeviceGet", index))
    return raw.split(b"\0", 1)[0].decode()


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
