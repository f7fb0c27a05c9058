"""Flight: a step that was launched on a GPU, or several, and is not known to have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtime.engine.gpu.captured_steps import CapturedStep
from runtime.engine.gpu.gathered_rows import GatheredRows
from runtime.engine.gpu.gpu_parts import Exchange
from runtime.engine.gpu.graph_times import read_all
from runtime.engine.gpu.links import Links
from runtime.engine.step import Step
from runtime.errors import ComputeError
from runtime.experts.totals import StepUse
from runtime.profiling.record import Part, Span, StepTimes

Uses = tuple[tuple[int, tuple[StepUse, ...]], ...]

NO_LAYERS = np.empty((0, 2))
LEAST_SECONDS = 1e-6
"""Of a layer with a miss; one without passes in a tenth of that."""


@dataclass(eq=False, slots=True)
class Flight:
    """A step's number, its graph, and since when it runs or would run.

    fresh     its graph was captured for it
    launched  by the host
    uses      see `StepResult`; known once it has ended
    lost      why nothing that it gave counts; for whoever wants its result, and nobody else
    """

    epoch: int
    step: Step
    captured: CapturedStep
    began: float
    fresh: bool = False
    launched: float = field(init=False)
    uses: Uses = ()
    lost: ComputeError | None = None

    def __post_init__(self) -> None:
        self.launched = self.began

    def check(self, *parties: Exchange | GatheredRows | Links | None) -> None:
        """See whether the step, which has ended, is lost."""
        for party in parties:
            try:
                if party is not None:
                    party.check(self.epoch, behind=self.step.follows)
            except ComputeError as error:
                self.lost = error

    def times(self, seen: float, exchange: Exchange | None, beside: list[Span]) -> list[StepTimes]:
        """Where the time went, of a step whose graph keeps times and whose end was `seen`.

        beside  what links did meanwhile
        """
        layers = NO_LAYERS if exchange is None else exchange.layer_times(self.epoch)
        host, busy = (self.launched, seen), layers[:, 1] - layers[:, 0]
        times = read_all(self.captured.times, self.epoch, host, busy, fresh=self.fresh)
        own, team = times[0].spans, layers.tolist()
        times[0].spans = lambda: [*own(), *beside, *team_spans(team)]
        return times


def team_spans(layers: list[list[float]]) -> Iterator[Span]:
    """Of the CPU team: the layers that it computed something of."""
    for posted, served in layers:
        if served - posted > LEAST_SECONDS:
            yield Span("CPU team", Part.MISSES, posted, served - posted)
