"""GraphTimes: what the stamps of one graph say, once a step has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runtime.engine.gpu.stamps import StampLayout, StampMemory
from runtime.profiling.record import Part, Span, StepTimes

F64 = NDArray[np.float64]

NANO = 1e-9
STEPS_THAT_BIND = 8
"""As many steps settle where the two clocks stand: over a second they drift by microseconds."""


class ClockFit:
    """Where a GPU's clock stands on the host's: a step begins after its launch, and ends before
    the host has seen that; the middle of what that leaves."""

    def __init__(self) -> None:
        self._earliest: deque[float] = deque(maxlen=STEPS_THAT_BIND)
        self._latest: deque[float] = deque(maxlen=STEPS_THAT_BIND)

    def see(self, launched: float, seen: float, first: float, last: float) -> None:
        """A step: two times of the host, in seconds, and two of the GPU's clock."""
        self._earliest.append(launched - first)
        self._latest.append(seen - last)

    @property
    def offset(self) -> float:
        """What to add to the GPU's seconds."""
        return (max(self._earliest) + min(self._latest)) / 2


class GraphTimes:
    """The times of a graph's parts; all steps of the graph share it."""

    def __init__(self, layout: StampLayout, memory: StampMemory, gpu: int) -> None:
        self._layout, self._memory = layout, memory
        self._gpu = gpu
        self._fit = ClockFit()
        self._parts = [part for part in Part if part in layout.parts]
        self._numbers = np.array([self._parts.index(part) for part in layout.parts])
        self._places = np.array(layout.places)
        self._since = np.array([wait.since for wait in layout.waits], np.int64)
        self._at = np.array([wait.at for wait in layout.waits], np.int64)

    @property
    def n_waits(self) -> int:
        """MoE layers whose misses the CPU computes."""
        return len(self._at)

    def read(
        self, epoch: int, host: tuple[float, float], busy: F64, *, first: bool, alone: bool
    ) -> StepTimes:
        """Of step `epoch`, which has ended.

        host   when the host launched it, and when it saw its end
        busy   seconds that the CPU team worked at each of `n_waits` layers
        first  the step begins on this GPU: else what it waits for at first was another one's work
        alone  it has the whole step: else it may begin with waiting for the end of the one before
        """
        stamps = self._memory.of(epoch)[: self._layout.n_stamps].copy()
        clock = NANO * (stamps - stamps[self._places[0]]).astype(np.int64)
        edges = clock[self._places]
        base = NANO * float(stamps[self._places[0]])
        self._fit.see(*host, base, base + float(edges[-1]))
        lengths = np.diff(edges)
        seconds = np.bincount(self._numbers, lengths, len(self._parts)).tolist()
        parts = dict(zip(self._parts, seconds, strict=True))
        if self.n_waits:
            waits = lengths[self._at]
            # What is left of a layer's time beside the team's work: posts and answers on their way.
            others = edges[self._at + 1] - edges[self._since] - busy
            exchange = float(np.clip(others, 0, waits).sum())
            parts[Part.EXCHANGE] = parts.get(Part.EXCHANGE, 0.0) + exchange
            parts[Part.MISSES] -= exchange
        if not alone:
            parts.pop(Part.LAUNCH, None)
        if not first:
            parts.pop(Part.HAND_OVER, None)
        shift = base + self._fit.offset
        return StepTimes(host[0], parts, partial(self._spans, edges + shift, clock + shift))

    def _spans(self, edges: F64, clock: F64) -> Iterator[Span]:
        track = f"GPU {self._gpu}"
        times = edges.tolist()
        for i, part in enumerate(self._layout.parts):
            yield Span(track, part, times[i], times[i + 1] - times[i])
        for part, start, end in self._layout.beside:
            began = float(clock[start])
            yield Span(f"link {self._gpu}", part, began, float(clock[end]) - began)


def read_all(
    graphs: Sequence[GraphTimes], epoch: int, host: tuple[float, float], busy: F64, *, fresh: bool
) -> list[StepTimes]:
    """Of all GPUs of a step; see `GraphTimes.read` and `StepTimes`; busy: of all their layers."""
    times: list[StepTimes] = []
    at = 0
    for graph in graphs:
        own = busy[at : at + graph.n_waits]
        at += graph.n_waits
        alone = len(graphs) == 1
        times.append(graph.read(epoch, host, own, first=not times, alone=alone))
        times[-1].fresh = fresh
    return times
