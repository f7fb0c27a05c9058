"""What a GPU's memory holds, seen from outside of the engine: how much is taken, and experts."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

import numpy as np

import runtime
from runtime.config import BUNDLED_MODEL
from runtime.cuda.device import Device
from runtime.cuda.driver import open_driver
from runtime.cuda.memory import PinnedBuffer
from runtime.cuda.stream import Stream
from runtime.experts.cached_experts import CachedExperts
from runtime.experts.host_experts import LayerExperts, layer_experts
from runtime.experts.pinned_pages import bytes_at
from runtime.models.model import open_model
from runtime.models.spec import MoeSpec


class GPUMemory:
    """The memory of all GPUs that this process sees."""

    def __init__(self) -> None:
        """Raises: DeviceUnavailable, CudaError."""
        driver = open_driver()
        with ExitStack() as resources:
            self._devices = [
                resources.enter_context(Device(driver, index))
                for index in range(int(driver.call("cuDeviceGetCount")))
            ]
            self._resources = resources.pop_all()

    def taken(self) -> int:
        """Bytes, by whomever."""
        return sum(device.info.memory_bytes - device.free_bytes() for device in self._devices)

    def __enter__(self) -> GPUMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()


def cache_of(engine: runtime.Engine) -> CachedExperts | None:
    """The engine's experts, if they are a cache on one GPU."""
    parts: Any = getattr(engine.executor, "_parts", None)
    store = getattr(parts, "experts", None)
    return store if isinstance(store, CachedExperts) else None


def vram_for(engine: runtime.Engine, n_experts: int) -> float:
    """GiB of the engine's GPU that leave room for so many experts of each layer."""
    executor: Any = engine.executor
    [memory] = executor._parts.memory._parts
    [share] = executor.planned.shares
    a_slot_each = sum(layer.experts.slot_bytes for layer in memory._layers)
    others = share.dense_bytes + share.settings.reserve_bytes + memory.plan.fetch_bytes
    return float(others + int((n_experts + 0.2) * a_slot_each)) / 2**30


class SlotCheck:
    """Compares experts in the slots of an engine on one GPU with the model's file."""

    def __init__(self, engine: runtime.Engine, store: CachedExperts) -> None:
        """store: `cache_of` the engine.  Raises: CudaError."""
        self._store = store
        with ExitStack() as resources:
            model = resources.enter_context(open_model(engine.config.model or BUNDLED_MODEL))
            layers = [layer.feed_forward for layer in model.spec.layers]
            self._rows = model.spec.n_expert_max
            self._layers: list[tuple[int, LayerExperts]] = [
                (index, layer_experts(model.weights, layer))
                for index, layer in enumerate(layers)
                if isinstance(layer, MoeSpec)
            ]
            device = resources.enter_context(Device(open_driver(), store._device.info.index))
            largest = max(m.n_bytes for _, layer in self._layers for m in layer.matrices)
            self._stream = resources.enter_context(Stream(device, "slot check"))
            self._buffer = resources.enter_context(PinnedBuffer(device, largest, "slot check"))
            self._resources = resources.pop_all()

    def __enter__(self) -> SlotCheck:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    async def some(self, engine: runtime.Engine, n: int, rng: random.Random) -> tuple[int, int]:
        """Compare up to n random experts between two steps; how many, and how many differ."""
        return await engine._steps.between_steps.result_of(
            lambda: asyncio.to_thread(self._some, n, rng)
        )

    def _some(self, n: int, rng: random.Random) -> tuple[int, int]:
        table = self._store.table().reshape(-1, self._rows, 4)
        there = np.argwhere(self._store.cache.slot_of >= 0).tolist()
        chosen = rng.sample(there, min(n, len(there)))
        return len(chosen), sum(not self._is_equal(table, *expert) for expert in chosen)

    def _is_equal(self, table: Any, at: int, expert: int) -> bool:
        index, layer = self._layers[at]
        for matrix, address in zip(layer.matrices, table[index, expert], strict=False):
            self._stream.download(self._buffer.host, int(address), matrix.n_bytes)
            self._stream.synchronize()
            of_file = bytes_at(matrix.host + expert * matrix.stride, matrix.n_bytes)
            if not np.array_equal(self._buffer.view[: matrix.n_bytes], of_file):
                return False
        return True
