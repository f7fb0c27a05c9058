"""What a missed expert costs here: measured in a fraction of a second, before the first step.

The CPU team serves posts that the host makes, of random experts of the model, alone and while the
link copies others; and the link copies them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import numpy as np

from runtime.cuda.copies import CopyBatch
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.stream import Event, Stream
from runtime.experts.exchange import Exchange
from runtime.experts.host_experts import HostExperts, HostPart
from runtime.experts.miss_rates import MissRates, rising

PROBE_SECONDS = 0.4
"""At most; pages that come from a disk would take forever."""
MOST_MISSES = 4
N_TIMES, N_BESIDE, N_WARM = 12, 6, 4
"""Of the team alone, beside the link, which is many times each, and before what counts."""
N_COPIES = 48
"""Copies that are under way beside the team: some milliseconds of them."""
FEWEST_PINNED = 16


def probe_misses(
    exchange: Exchange, host: HostExperts | HostPart, device: Device, n_used: int
) -> MissRates:
    """What the first layers' rates are; n_used: experts of a token.  No step has begun.

    Raises: CudaError, OutOfDeviceMemory.
    """
    probe = _Probe(exchange, host, n_used)
    for _ in range(N_WARM):
        probe.team(1)
    most = min(n_used, MOST_MISSES)
    cpu = rising([probe.typical(n) for n in range(1, most + 1)])
    pinned = np.argwhere(host.pinned_experts)
    if len(pinned) < FEWEST_PINNED or probe.is_late:
        return MissRates(cpu)
    with ExitStack() as resources:
        link = _Link(device, host, pinned, resources)
        alone, _ = link.beside(lambda: None)
        times: list[list[float]] = [[] for _ in range(most)]
        beside = []
        for _ in range(N_BESIDE):
            for n in range(1, most + 1):
                seconds, taken = link.beside(lambda n=n: probe.team(n))  # type: ignore[misc]
                beside.append(seconds)
                times[n - 1] += taken
            if probe.is_late:
                break
    slower = [median(found) if found else us for found, us in zip(times, cpu, strict=True)]
    return MissRates(cpu, rising(slower), alone, median(beside))


class _Probe:
    def __init__(self, exchange: Exchange, host: HostExperts | HostPart, n_used: int) -> None:
        self._exchange, self._layers = exchange, host.layers
        self._rng = np.random.default_rng(0)
        self._until = time.perf_counter() + PROBE_SECONDS

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self._until

    def team(self, n: int) -> float:
        """Microseconds of n missed experts of some layer."""
        layer = int(self._rng.integers(len(self._layers)))
        experts = self._rng.permutation(self._layers[layer].n_expert)[:n]
        return 1e6 * self._exchange.timed(layer, experts.tolist())

    def typical(self, n: int) -> float:
        times = [self.team(n)]
        while len(times) < N_TIMES and not self.is_late:
            times.append(self.team(n))
        return median(times)


class _Link:
    """Copies of pinned experts into one slot, again and again."""

    def __init__(
        self,
        device: Device,
        host: HostExperts | HostPart,
        pinned: np.ndarray[tuple[int, int], np.dtype[np.intp]],
        resources: ExitStack,
    ) -> None:
        own = resources.enter_context
        self._stream = own(Stream(device, "probe"))
        self._batch = CopyBatch(self._stream)
        self._first, self._last = own(Event(device, timed=True)), own(Event(device, timed=True))
        size = max(layer.slot_bytes for layer in host.layers)
        self._buffer = own(DeviceBuffer(device, size, "probe"))
        chosen = np.random.default_rng(1).integers(len(pinned), size=N_COPIES)
        self._copies = [
            (self._buffer.address + offset, source, n_bytes)
            for at in chosen
            for offset, source, n_bytes in host.copies(*map(int, pinned[at]))
        ]
        resources.callback(self._stream.synchronize)

    def beside(self, work: Callable[[], float | None]) -> tuple[float, list[float]]:
        """Microseconds of a copy, and what `work` gave each time, all of it beside copies."""
        taken: list[float] = []
        self._stream.record(self._first)
        self._batch.upload(self._copies)
        self._stream.record(self._last)
        while not self._last.passed():
            found = work()
            if found is not None and not self._last.passed():
                taken.append(found)
        return 1e3 * self._last.milliseconds_since(self._first) / N_COPIES, taken
