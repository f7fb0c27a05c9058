"""Which GPUs compute a model, and how many of its layers each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from runtime.cuda.device import Device
from runtime.cuda.driver import Driver
from runtime.engine.gpu.kv import CacheSizes
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share import end_bytes, layer_bytes, split_layers
from runtime.engine.gpu.share_opening import MARGIN_BYTES, usable_bytes
from runtime.errors import ConfigError, DeviceUnavailable, OutOfDeviceMemory
from runtime.models.model import Model

logger = logging.getLogger(__name__)


def open_devices(
    driver: Driver, settings: GPUSettings, n_layers: int, resources: ExitStack
) -> list[Device]:
    """The GPUs to use, at most one a layer; `resources` closes them.

    Those that nobody named and that are too old, or full, are left out.
    Raises: DeviceUnavailable, ConfigError, CudaError.
    """
    n_devices = int(driver.call("cuDeviceGetCount"))
    if not settings.split:
        return [resources.enter_context(Device(driver, settings.main_gpu))]
    if settings.tensor_split is not None:
        named = [index for index, share in enumerate(settings.tensor_split) if share > 0]
        if max(named) >= n_devices:
            raise ConfigError(
                f"tensor_split = {','.join(map(str, settings.tensor_split))}: "
                f"this machine shows {n_devices} GPUs"
            )
        return [resources.enter_context(Device(driver, index)) for index in named[:n_layers]]
    devices: list[Device] = []
    for index in range(n_devices):
        try:
            device = Device(driver, index)
        except (DeviceUnavailable, OutOfDeviceMemory) as error:
            if n_devices == 1:
                raise
            logger.warning("GPU %d is left out: %s", index, error)
            continue
        resources.callback(device.close)
        devices.append(device)
    usable = [device for device in devices if usable_bytes(device, settings) > MARGIN_BYTES]
    chosen = usable or devices
    if not chosen:
        raise DeviceUnavailable(f"none of the {n_devices} GPUs can be used")
    return chosen[: n_layers if usable else 1]


def layers_of_each(
    model: Model, settings: GPUSettings, devices: Sequence[Device], n_pages: int
) -> list[int]:
    """How many layers each GPU takes, in order."""
    if len(devices) == 1:
        return [len(model.spec.layers)]
    if settings.tensor_split is None:
        room = [float(usable_bytes(device, settings) - MARGIN_BYTES) for device in devices]
    else:
        room = [settings.tensor_split[device.info.index] for device in devices]
    kv = CacheSizes(model.spec, settings.cache_type_k, settings.cache_type_v)
    sizes = [
        matrices + (0 if cached is None else n_pages * sum(cached.side_bytes))
        for matrices, cached in zip(layer_bytes(model), kv.layers, strict=True)
    ]
    return split_layers(sizes, end_bytes(model), room)
