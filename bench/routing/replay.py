"""Replay of a trace through the engine's own cache bookkeeping, with a clock instead of a GPU.

The order of calls is that of `runtime.experts.cached_experts`: a step sees what had arrived before
it began; the swaps that its experts suggest are decided while the next one runs, wait for the steps
that may read the slot, and take their time on the link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.routing.rates import Rates
from profiles import Phase, RoutingTrace
from runtime.experts.cache import NO_SLOT, ExpertCache, LayerShape, Rows
from runtime.experts.policy import Policy

MAX_CHANGES = 64
I64 = NDArray[np.int64]
MakePolicy = Callable[[ExpertCache], Policy]


@dataclass(frozen=True)
class Slots:
    """How the GPU's memory is divided.

    classes   size class of each layer: layers of one class share slots
    per_class slots of each class
    """

    classes: tuple[int, ...]
    per_class: dict[int, int]

    @property
    def n_slots(self) -> int:
        return sum(self.per_class.values())

    def cache(self, trace: RoutingTrace) -> ExpertCache:
        """An empty one."""
        shapes = [LayerShape(n, c) for n, c in zip(trace.n_expert, self.classes, strict=True)]
        slot_classes = [c for c, n in self.per_class.items() for _ in range(n)]
        return ExpertCache(shapes, slot_classes)


def shared_slots(trace: RoutingTrace, share: float) -> Slots:
    """Room for `share` of all experts; layers whose experts have one size share it."""
    sizes = sorted(set(trace.expert_bytes))
    classes = tuple(sizes.index(size) for size in trace.expert_bytes)
    per_class: dict[int, int] = {}
    for layer, size_class in enumerate(classes):
        per_class[size_class] = per_class.get(size_class, 0) + trace.n_expert[layer]
    return Slots(classes, {c: max(1, round(share * n)) for c, n in per_class.items()})


def layer_slots(trace: RoutingTrace, counts: Sequence[int]) -> Slots:
    """So many slots for each layer alone."""
    return Slots(tuple(range(trace.n_layers)), dict(enumerate(counts)))


@dataclass(frozen=True)
class Outcome:
    """What a replay gave, of the generated tokens after the warm-up.

    hits, misses    experts
    uploaded_bytes  sent over the link
    ms              predicted for all tokens
    policy_us       host time of the policy's calls a step, mean without the slowest twentieth,
                    during which other programs had the core
    """

    n_tokens: int
    hits: int
    misses: int
    uploaded_bytes: int
    missed_bytes: int
    ms: float
    policy_us: float

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def ms_per_token(self) -> float:
        return self.ms / max(self.n_tokens, 1)


def replay(
    trace: RoutingTrace,
    slots: Slots,
    rates: Rates,
    make_policy: MakePolicy,
    *,
    warm_up: int = 256,
    most_uploads: int = 8,
) -> Outcome:
    """Steps of prompt tokens only inform the policy: the engine streams experts for those."""
    cache = slots.cache(trace)
    policy = make_policy(cache)
    run = Run(trace, cache, policy, rates, most_uploads)
    end = np.cumsum(trace.steps)
    n_seen = 0
    steps = zip((end - trace.steps).tolist(), end.tolist(), trace.phases.tolist(), strict=True)
    for first, last, phase in steps:
        choices = np.ascontiguousarray(trace.choices[first:last].transpose(1, 0, 2))
        if phase == Phase.GENERATED:
            n_seen += last - first
            run.step(choices, counted=n_seen > warm_up)
        else:
            policy.used(choices)
    return run.outcome()


class Run:
    """The clock, the link and the sums of one replay; `step` by step."""

    def __init__(
        self,
        trace: RoutingTrace,
        cache: ExpertCache,
        policy: Policy,
        rates: Rates,
        most_uploads: int,
    ) -> None:
        """Fills the slots."""
        for layer, expert in policy.first(cache):
            cache.fill(layer, expert)
        self._most = most_uploads
        self._cache, self._policy, self._rates = cache, policy, rates
        self._expert_bytes = np.array(trace.expert_bytes, np.float64)
        self._slots = cache.slot_of.reshape(-1)
        n_layers, n_expert = cache.slot_of.shape
        self._bases = (np.arange(n_layers) * n_expert)[:, None, None]
        self._n_layers, self._n_expert = n_layers, n_expert
        self._now = self._link_free = self._step_ms = 0.0
        self._flying: deque[tuple[float, list[int]]] = deque()
        self._seen: NDArray[np.int32] | None = None
        self._n_tokens = self._hits = self._misses = 0
        self._uploaded = self._missed = self._ms = 0.0
        self._times: list[float] = []

    def step(self, choices: NDArray[np.int32], *, counted: bool) -> None:
        """choices i32[n_layers, n_tokens, n_used]"""
        arrived = list[list[int]]()
        while self._flying and self._flying[0][0] <= self._now:
            arrived.append(self._flying.popleft()[1])
        self._cache.begin_step(Rows.of(arrived), MAX_CHANGES)
        cells = (choices + self._bases)[choices >= 0]
        found = self._slots[cells] != NO_SLOT
        hit = self._layer_counts(cells[found])
        missed = self._layer_counts(cells[~found])
        uploaded = self._decide()
        self._step_ms = self._time(hit * self._expert_bytes, missed * self._expert_bytes)
        self._now += self._step_ms
        self._cache.end_step()
        self._seen = choices
        if counted:
            self._n_tokens += choices.shape[1]
            n_found = int(found.sum())
            self._hits += n_found
            self._misses += len(cells) - n_found
            self._missed += float((missed * self._expert_bytes).sum())
            self._uploaded += uploaded
            self._ms += self._step_ms

    def _layer_counts(self, cells: I64) -> I64:
        """Different experts of each layer: weights are read once, however many tokens use them."""
        return np.bincount(cells // self._n_expert, minlength=self._n_layers)

    def _decide(self) -> float:
        """The policy's turn, and uploads that start; their bytes."""
        room = self._room()
        began = time.perf_counter()
        if self._seen is not None:
            self._policy.used(self._seen)
        swaps = self._policy.swaps(self._cache, room)
        self._times.append(time.perf_counter() - began)
        n_bytes = 0.0
        for upload in self._cache.swap(swaps, self._most).values.tolist():
            size = float(self._expert_bytes[upload[0] // self._n_expert])
            n_bytes += size
            self._link_free = max(self._link_free, self._now) + size / (self._rates.link * 1e6)
            self._flying.append((self._link_free, upload))
        return n_bytes

    def _room(self) -> int:
        """Uploads that fit into the link's share of a step, less what waits."""
        an_upload = float(self._expert_bytes.max()) / (self._rates.link * 1e6)
        most = int(self._rates.share * self._step_ms / an_upload) if self._step_ms else 1
        return min(max(most, 1), self._most) - self._cache.n_pending

    def _time(self, hit_bytes: NDArray[np.float64], miss_bytes: NDArray[np.float64]) -> float:
        alone = self._rates.step_ms(hit_bytes, miss_bytes, 0.0)
        busy = min(max(self._link_free - self._now, 0.0), alone) / alone
        return self._rates.step_ms(hit_bytes, miss_bytes, busy)

    def outcome(self) -> Outcome:
        return Outcome(
            self._n_tokens,
            self._hits,
            self._misses,
            int(self._uploaded),
            int(self._missed),
            self._ms,
            1e6 * trimmed_mean(self._times),
        )


def trimmed_mean(times: list[float]) -> float:
    """Without the highest twentieth."""
    kept = sorted(times)[: max(1, len(times) * 19 // 20)]
    return sum(kept) / max(len(kept), 1)
