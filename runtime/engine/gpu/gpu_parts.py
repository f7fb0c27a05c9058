"""GPUParts: what an executor is made of, on one GPU or on several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine.gpu.captured_steps import CapturedStep
from runtime.engine.gpu.expert_memory import ExpertMemories
from runtime.engine.gpu.experts import StepExperts
from runtime.engine.gpu.gathered_rows import GatheredRows
from runtime.engine.gpu.gpu_plan import GPUPlan
from runtime.engine.gpu.links import Links
from runtime.engine.gpu.results import Results
from runtime.engine.gpu.step_shape import StepShape, StepShapes
from runtime.experts.miss_rule import MissRule


@dataclass
class GPUParts:
    """`resources` closes all of it.

    stream    what graphs are launched into, and page and state copies are put into
    states    of sequences; None: the model has none
    exchange  has the CPU compute missed experts; None: there are none
    n_layers  of the model, all of which are some GPU's
    links     between several GPUs; None: there is one
    planned   what it holds, and why
    memory    of the experts, which may grow and shrink between steps
    memories  rows that the CPU gathers for each step; None: the model has no such tables
    misses    who serves the experts that no GPU holds; None: the GPUs hold all
    """

    stream: AnyStream
    pages: Pages
    states: States | None
    experts: StepExperts
    exchange: Exchange | None
    shapes: StepShapes
    steps: Steps
    results: Results
    resources: ExitStack
    facts: dict[str, object]
    planned: GPUPlan
    memory: ExpertMemories
    n_layers: int
    links: Links | None = None
    memories: GatheredRows | None = None
    misses: MissRule | None = None


class AnyStream(Protocol):
    """`runtime.cuda.stream.Stream`, or those of several GPUs."""

    def idle(self) -> bool: ...


class PageSizes(Protocol):
    """See `runtime.engine.gpu.kv.CacheSizes`."""

    @property
    def page_bytes(self) -> int: ...

    cache_types: tuple[str, str]


class Pages(Protocol):
    """See `runtime.engine.gpu.kv.PageMemory`."""

    n_pages: int
    n_bytes: int
    page_tokens: int

    @property
    def sizes(self) -> PageSizes: ...

    def copy(self, copies: Sequence[tuple[int, int]], stream: Any) -> None: ...

    def save(self, pages: Sequence[int], stream: Any) -> bytes: ...

    def load(self, pages: Sequence[int], image: bytes, stream: Any) -> None: ...


class States(Protocol):
    """See `runtime.engine.gpu.state_slots.StateMemory`."""

    n_slots: int

    def copy(self, copies: Sequence[tuple[int, int]], stream: Any) -> None: ...

    def save(self, slot: int, stream: Any) -> bytes: ...

    def load(self, slot: int, image: bytes, stream: Any) -> None: ...

    def describe(self) -> dict[str, object]: ...


class Steps(Protocol):
    """See `runtime.engine.gpu.captured_steps.CapturedSteps`."""

    def __len__(self) -> int: ...

    def of(self, shape: StepShape) -> CapturedStep: ...

    def is_captured(self, shape: StepShape) -> bool: ...

    def all(self) -> list[CapturedStep]: ...

    def drop(self, shapes: Iterable[StepShape]) -> None: ...


class Exchange(Protocol):
    """See `runtime.experts.exchange.Exchange`."""

    @property
    def at_work(self) -> int: ...

    def ended(self, epoch: int) -> bool: ...

    def begin(self, epoch: int, *, behind: bool = False) -> None: ...

    def check(self, epoch: int, *, behind: bool = False) -> None: ...

    def abort(self) -> None: ...

    def layer_times(self, epoch: int) -> NDArray[np.float64]: ...

    def team_seconds(self) -> tuple[float, float]: ...
