"""The only file that talks to the CUDA driver, through cuda-python's bindings."""

from __future__ import annotations

from typing import Any

from runtime.errors import DeviceUnavailable


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """Return what a driver call returned, or raise DeviceUnavailable with the driver's own code."""
    code, *values = result
    if int(code) != 0:
        raise DeviceUnavailable(f"{call} failed with {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else tuple(values)


def device_names() -> tuple[str, ...]:
    """The names of this machine's NVIDIA GPUs, in the driver's order.

    Raises: DeviceUnavailable, in one sentence, where there is no binding, driver or device.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceUnavailable(f"cuda-python is not usable here ({error})") from error
    try:
        checked("cuInit", driver.cuInit(0))
    except RuntimeError as error:  # the bindings' own "no libcuda found"
        raise DeviceUnavailable("no NVIDIA driver (libcuda) on this machine") from error
    count = checked("cuDeviceGetCount", driver.cuDeviceGetCount())
    names = []
    for index in range(count):
        device = checked("cuDeviceGet", driver.cuDeviceGet(index))
        raw = checked("cuDeviceGetName", driver.cuDeviceGetName(128, device))
        names.append(raw.split(b"\0", 1)[0].decode())
    return tuple(names)
