"""Which GPUs compute a model, and how many of its layers each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise

from runtime.cuda.device import Device
from runtime.cuda.driver import Driver
from runtime.engine.gpu.kv import CacheSizes
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.gpu.share import end_bytes, layer_bytes, parts_of, split_parts
from runtime.engine.gpu.share_plan import usable_bytes
from runtime.engine.machine import GPUFacts
from runtime.errors import ConfigError, DeviceUnavailable, OutOfDeviceMemory
from runtime.models.model import Model
from runtime.notices import Reason


def open_devices(
    driver: Driver, settings: GPUSettings, n_parts: int, resources: ExitStack
) -> list[Device]:
    """The GPUs that may be used, at most one for each part; `resources` closes them.

    n_parts  that the model's layers can be cut into: see `parts_of`

    Those that nobody named and that are too old, or full, are left out.
    Raises: DeviceUnavailable, ConfigError, CudaError.
    """
    n_devices = int(driver.call("cuDeviceGetCount"))
    if settings.split is False:
        return [resources.enter_context(Device(driver, settings.main_gpu))]
    if settings.tensor_split is not None:
        named = named_gpus(settings.tensor_split, n_devices)
        return [resources.enter_context(Device(driver, index)) for index in named[:n_parts]]
    devices: list[Device] = []
    for index in range(n_devices):
        try:
            device = Device(driver, index)
        except (DeviceUnavailable, OutOfDeviceMemory) as error:
            if n_devices == 1:
                raise
            settings.notices.add(Reason.GPU_LEFT_OUT, f"GPU {index}: {error}")
            continue
        resources.callback(device.close)
        devices.append(device)
    if not devices:
        raise DeviceUnavailable(f"none of the {n_devices} GPUs can be used")
    facts = [GPUFacts(device.info, device.free_bytes()) for device in devices]
    used = {gpu.info.index for gpu in with_room(facts, settings, n_parts)}
    return [device for device in devices if device.info.index in used]


def named_gpus(tensor_split: Sequence[float], n_gpus: int) -> list[int]:
    """The GPUs that have a share.  Raises: ConfigError where there are fewer."""
    named = [index for index, share in enumerate(tensor_split) if share > 0]
    if max(named) >= n_gpus:
        raise ConfigError(
            f"tensor_split = {','.join(map(str, tensor_split))}: this machine shows {n_gpus} GPUs"
        )
    return named


def with_room(gpus: Sequence[GPUFacts], settings: GPUSettings, n_parts: int) -> Sequence[GPUFacts]:
    """Those that are not full already, at most one for each part; if all are, the first."""
    usable = [
        gpu for gpu in gpus if usable_bytes(gpu.free_bytes, settings) > settings.reserve_bytes
    ]
    return usable[:n_parts] if usable else gpus[:1]


def described_gpus(
    gpus: Sequence[GPUFacts], settings: GPUSettings, n_parts: int
) -> Sequence[GPUFacts]:
    """The same choice among GPUs that nobody opens.  Raises: DeviceUnavailable, ConfigError."""
    if not gpus:
        raise DeviceUnavailable("there is no GPU")
    if settings.split is False:
        if settings.main_gpu >= len(gpus):
            raise DeviceUnavailable(f"there is no GPU {settings.main_gpu}: there are {len(gpus)}")
        return [gpus[settings.main_gpu]]
    if settings.tensor_split is not None:
        return [gpus[index] for index in named_gpus(settings.tensor_split, len(gpus))][:n_parts]
    return with_room(gpus, settings, n_parts)


def layers_of_each(
    model: Model, settings: GPUSettings, gpus: Sequence[GPUFacts], n_pages: int
) -> list[int]:
    """How many layers each GPU takes, in order."""
    if len(gpus) == 1:
        return [len(model.spec.layers)]
    if settings.tensor_split is None:
        room = [
            float(usable_bytes(gpu.free_bytes, settings) - settings.reserve_bytes) for gpu in gpus
        ]
    else:
        room = [settings.tensor_split[gpu.info.index] for gpu in gpus]
    kv = CacheSizes(model.spec, settings.cache_type_k, settings.cache_type_v)
    sizes = [
        matrices + (0 if cached is None else n_pages * sum(cached.side_bytes))
        for matrices, cached in zip(layer_bytes(model), kv.layers, strict=True)
    ]
    counts = parts_of(model.spec)
    edges = (0, *accumulate(counts))
    parts = [sum(sizes[start:end]) for start, end in pairwise(edges)]
    ends = (0, *accumulate(split_parts(parts, end_bytes(model), room)))
    return [edges[end] - edges[start] for start, end in pairwise(ends)]
