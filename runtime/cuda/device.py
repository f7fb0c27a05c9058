"""One GPU: its primary context, what it is able to do, and everything opened on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from runtime.cuda.driver import PTX_VERSION, Driver, device_name
from runtime.cuda.resource import Resource
from runtime.errors import CudaError, DeviceError, DeviceUnavailable, OutOfDeviceMemory

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)

NO_PEERS = ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "CUDA_ERROR_TOO_MANY_PEERS")
"""Codes that say that two GPUs stay apart although they need not."""


_STAYING = threading.local()
"""`device`: the one whose context is known to be current on this thread, if there is one."""


@dataclass(frozen=True)
class DeviceInfo:
    """What a GPU is.

    capability          compute capability, (9, 0) for sm_90
    memory_bytes        all of its memory
    block_shared_bytes  shared memory that one block may ask for
    n_copy_engines      copies that can run beside kernels
    registers_host      ordinary host memory can be registered, read_only: also read-only maps
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    n_multiprocessors: int
    block_shared_bytes: int
    l2_bytes: int
    n_copy_engines: int
    registers_host: bool
    registers_read_only: bool

    @property
    def architecture(self) -> str:
        """The assembler's name of the capability."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


class Device:
    """An open GPU. Threads may share it: each call makes the context current where it is made.

    The primary context is the one that other libraries of the process use too, so it is never
    assumed to be current still (setting it is well below a microsecond).
    """

    def __init__(self, driver: Driver, index: int = 0) -> None:
        """Raises: DeviceUnavailable for a GPU that is missing or too old, CudaError."""
        self.driver = driver
        self.info = device_info(driver, index)
        if self.info.capability < MIN_CAPABILITY:
            raise DeviceUnavailable(
                f"{self.info.name} has compute capability "
                f"{'.'.join(map(str, self.info.capability))}; the kernels need "
                f"{'.'.join(map(str, MIN_CAPABILITY))} (Ampere) or newer"
            )
        self._resources: dict[int, Resource] = {}
        self._device = driver.call("cuDeviceGet", index)
        self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
        self._enter = driver.native("cuCtxSetCurrent", 1)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Have this thread stay in the device's context: nothing else than our own code runs on it
        inside the block.  Each call then gives the interpreter up once instead of twice, which
        counts where other threads compute.  A call of another device ends that.  Raises: as `call`.
        """
        self._make_current()
        _STAYING.device = self
        try:
            yield
        finally:
            _STAYING.device = None

    def call(self, name: str, *args: Any, asked: int | None = None) -> Any:
        """A driver call in this device's context; `asked` bytes stand in OutOfDeviceMemory.

        Raises: CudaError and its subclasses; DeviceUnavailable after `close`.
        """
        self._make_current()
        try:
            return self.driver.call(name, *args)
        except OutOfDeviceMemory:
            raise OutOfDeviceMemory(name, asked, self._free_bytes_or_none()) from None

    def ready(self, name: str, *args: Any) -> bool:
        """Whether work has ended, by a driver call in this device's context that tells.

        Raises: as `call`.
        """
        self._make_current()
        return self.driver.ready(name, *args)

    def _make_current(self) -> None:
        if self._context is None:
            raise DeviceUnavailable(f"{self.info.name} is closed")
        if getattr(_STAYING, "device", None) is not self:
            _STAYING.device = None
            self.driver.call("cuCtxSetCurrent", self._context)

    def native(self, name: str, n_args: int, version: int = PTX_VERSION) -> Callable[..., bool]:
        """`Driver.native` in this device's context; what it returns is `Driver.passed` already.

        Raises: CudaError for a function that the driver lacks; it: as `call`.
        """
        function, driver = self.driver.native(name, n_args, version), self.driver

        def call(*args: int) -> bool:
            if self._context is None:
                raise DeviceUnavailable(f"{self.info.name} is closed")
            if getattr(_STAYING, "device", None) is not self:
                _STAYING.device = None
                code = self._enter(int(self._context)) or function(*args)
            else:
                code = function(*args)
            return not code or driver.passed(name, code)

        return call

    def reach(self, other: Device) -> bool:
        """Let kernels here touch the other GPU's memory; False where that is impossible.

        Raises: CudaError.
        """
        if not self.driver.call("cuDeviceCanAccessPeer", self._device, other._device):
            return False
        try:
            self.call("cuCtxEnablePeerAccess", other._context, 0)
        except CudaError as error:
            if error.code in NO_PEERS:
                return False
            if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise
        return True

    def free_bytes(self) -> int:
        """Memory that no process holds at this moment. Raises: CudaError."""
        free, _ = self.call("cuMemGetInfo")
        return int(free)

    def track(self, resource: Resource) -> None:
        """Remember that the resource is open."""
        self._resources[id(resource)] = resource

    def forget(self, resource: Resource) -> None:
        """The resource is closed."""
        self._resources.pop(id(resource), None)

    @property
    def open_resources(self) -> tuple[Resource, ...]:
        """What is open now, oldest first."""
        return tuple(self._resources.values())

    def close(self) -> None:
        """Wait for the GPU, release what was left open with a warning, and leave the context."""
        if self._context is None:
            return
        left = self.open_resources
        try:
            self.call("cuCtxSynchronize")
        except DeviceError as error:
            logger.warning("%s: %s", self.info.name, error)
        if left:
            logger.warning("left open on %s: %s", self.info.name, ", ".join(map(str, left)))
        for resource in reversed(left):
            try:
                resource.close()
            except DeviceError as error:
                logger.warning("%s: %s", resource, error)
        self._context = None
        self.driver.call("cuDevicePrimaryCtxRelease", self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _free_bytes_or_none(self) -> int | None:
        try:
            return int(self.driver.call("cuMemGetInfo")[0])
        except DeviceError:
            return None


def device_info(driver: Driver, index: int) -> DeviceInfo:
    """What the GPU at `index` is; opens nothing.

    Raises: DeviceUnavailable if there is no such GPU, CudaError.
    """
    count = int(driver.call("cuDeviceGetCount"))
    if not 0 <= index < count:
        raise DeviceUnavailable(f"there is no GPU {index}: this machine shows {count}")
    device = driver.call("cuDeviceGet", index)
    kinds = driver.api.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", kind, device))

    return DeviceInfo(
        index,
        device_name(driver, index),
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        int(driver.call("cuDeviceTotalMem", device)),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("L2_CACHE_SIZE"),
        attribute("ASYNC_ENGINE_COUNT"),
        bool(attribute("HOST_REGISTER_SUPPORTED")),
        bool(attribute("READ_ONLY_HOST_REGISTER_SUPPORTED")),
    )
