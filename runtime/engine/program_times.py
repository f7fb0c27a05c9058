"""ProgramTimes: where the time of a step on the CPU goes, by the times that its program keeps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.cpu.clock import ClockedProgram, CycleClock
from runtime.profiling.record import Part, Span, StepTimes

TRACK = "CPU team"
ATTENTION = ("heads", "attention", "attention_end")
ROUTER = ("router", "route", "group")
EXPERTS = ("gate_up", "down")


class ProgramTimes:
    """Reads the times of one program, after its runs."""

    def __init__(self, program: ClockedProgram, clock: CycleClock) -> None:
        self._program, self._clock = program, clock
        names = set(program.clocked)
        self._jobs = [part_of(name, names) for name in program.clocked]
        self._parts = [part for part in Part if part in self._jobs]
        self._numbers = np.array([self._parts.index(part) for part in self._jobs])

    def read(self, launched: float, *, fresh: bool) -> StepTimes:
        """Of the run that ended last."""
        edges = self._clock.seconds(self._program.times[: len(self._jobs) + 1])
        seconds = np.bincount(self._numbers, np.diff(edges), len(self._parts)).tolist()
        parts = dict(zip(self._parts, seconds, strict=True))
        return StepTimes(launched, parts, partial(self._spans, edges.tolist()), fresh)

    def _spans(self, edges: list[float]) -> Iterator[Span]:
        """Jobs of one part in a row are one."""
        began = edges[0]
        for i, part in enumerate(self._jobs):
            if i + 1 == len(self._jobs) or self._jobs[i + 1] is not part:
                yield Span(TRACK, part, began, edges[i + 1] - began)
                began = edges[i + 1]


def part_of(name: str, names: set[str]) -> Part:
    """The part that a job belongs to; names: of all jobs."""
    layer, _, kind = name.rpartition(".")
    if kind == "logits":
        return Part.LOGITS
    if kind in ATTENTION:
        return Part.ATTENTION
    if kind in ROUTER:
        return Part.ROUTER
    if kind in EXPERTS and f"{layer}.route" in names:
        return Part.EXPERTS
    return Part.DENSE
