"""StepRecord: one step of an engine, and where its time went.

All times are seconds of `time.perf_counter`; those of a GPU and of the CPU team are moved there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Part(StrEnum):
    """What a step waits for, in the order in which it is shown.

    DENSE     norms, matrices that every token uses, shared experts; on a GPU attention too
    ATTENTION on the CPU: of the tokens to those before
    ROUTER    choosing experts
    HITS      experts that the GPU holds
    EXPERTS   experts, where the CPU computes everything
    MISSES    the GPU has nothing to do until the CPU has computed missed experts
    EXCHANGE  the rest of those waits: posts and answers on their way
    UPLOADS   the GPU waits for experts that a prompt fetches over the link
    HAND_OVER from one GPU to the next
    LOGITS    the output matrix, and choosing tokens where the GPU does
    LAUNCH    between the host's launch and the first kernel, between the last one and the host's
              notice; on the CPU, between the loop and the team
    SAMPLING  choosing tokens and making text on the host
    HOST      whatever else the loop does before a launch: scheduling, control blocks, callers
    """

    DENSE = "dense"
    ATTENTION = "attention"
    ROUTER = "router"
    HITS = "hits"
    EXPERTS = "experts"
    MISSES = "misses"
    EXCHANGE = "exchange"
    UPLOADS = "uploads"
    HAND_OVER = "hand-over"
    LOGITS = "logits"
    LAUNCH = "launch"
    SAMPLING = "sampling"
    HOST = "host"


LOOP = "loop"
"""The track of the event loop."""


class StepSort(StrEnum):
    """What the tokens of a step are."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work on a track: `loop`, `GPU 0`, `CPU team`, `link 0`."""

    track: str
    name: str
    began: float
    seconds: float


def no_spans() -> Iterable[Span]:
    return ()


@dataclass(slots=True)
class StepTimes:
    """What an executor saw of one launch.

    launched  when the host handed it over
    parts     seconds between the first and the last stamp of what performed it: they leave nothing
              out
    spans     gives the same in order, and whatever ran beside it
    fresh     something was made for it first, such as a graph: its times are not typical
    """

    launched: float
    parts: dict[Part, float] = field(default_factory=dict)
    spans: Callable[[], Iterable[Span]] = no_spans
    fresh: bool = False


NO_PARTS: Mapping[Part, float] = {}
Choosing = tuple[float, float]
"""When tokens were chosen, and for how many seconds."""


@dataclass(slots=True, eq=False)
class StepRecord:
    """A step that has ended.  Nobody changes it; it is not frozen, which would take a microsecond.

    number    of all steps since the engine opened
    n_outputs tokens that it led to
    began     when the one before had ended, or the loop had work again; ended: when the host knew
    parts     seconds of each part, `ended - began` in all; empty where the step was not timed
    launches, waited, choices  see `spans`
    fresh     see `StepTimes`; such steps are left out of summaries
    """

    number: int
    sort: StepSort
    n_tokens: int
    n_outputs: int
    began: float
    ended: float
    parts: Mapping[Part, float] = field(default_factory=dict)
    launches: tuple[StepTimes, ...] = ()
    waited: float = 0.0
    choices: tuple[Choosing, ...] = ()
    fresh: bool = False

    @property
    def spans(self) -> list[Span]:
        """On the tracks of whatever worked; of a step that was not timed, those of the loop.

        Made when they are asked for, which takes microseconds each.
        """
        spans = [Span(LOOP, Part.SAMPLING, *choosing) for choosing in self.choices]
        if self.waited:
            spans.append(Span(LOOP, Part.HOST, self.began, self.waited))
        return spans + [span for launch in self.launches for span in launch.spans()]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def timed(self) -> bool:
        return bool(self.parts)


def added(times: Iterable[Mapping[Part, float]]) -> dict[Part, float]:
    """Seconds of each part in all of them, in the order of `Part`."""
    total: dict[Part, float] = {}
    for parts in times:
        for part, seconds in parts.items():
            total[part] = total.get(part, 0.0) + seconds
    return {part: total[part] for part in Part if part in total}
