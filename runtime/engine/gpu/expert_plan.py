"""ExpertPlan: which routed experts each GPU holds, and how.  Pure.

all     every one: no cache machinery runs
cache   a number of every layer, which follow use
layers  all of the first layers: where a cache of every layer would be too thin to pay
none    the CPU computes them
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from runtime.config import environment
from runtime.engine.gpu.settings import GPUSettings
from runtime.errors import ConfigError
from runtime.experts.fetched_experts import FETCHED_TOKENS, fetch_bytes
from runtime.experts.host_experts import LayerExperts, layer_experts
from runtime.experts.known_use import KnownUse
from runtime.models.spec import MoeSpec
from runtime.models.weights import Weight

FETCH_SHARE = 0.34
"""Of the VRAM that is left for experts, what those that prompts fetch may take."""

HANDOVER_US = 7.0
"""What the first miss of a layer costs beside its reading: measured, see docs/gpu-hybrid.md."""

READ_GBS = 100.0
"""What the CPU's workers read: of the assumption only the proportion to HANDOVER_US counts."""

SWAPS_A_TOKEN = 4
"""Experts that are copied to the GPU meanwhile; each takes as much memory traffic as a miss."""


HITS_EXPONENT, KEPT_EXPONENT = 0.345, 0.3
"""Of the share of a layer's experts that a cache holds, and of that of two tokens' experts."""

MOST_OFF = 32.0
"""By which power at most what a cache served may correct that."""


class Holding(StrEnum):
    ALL = "all"
    CACHE = "cache"
    LAYERS = "layers"
    NONE = "none"


MODES = {
    "auto": None,
    "cache": Holding.CACHE,
    "layers": Holding.LAYERS,
    "stock": Holding.LAYERS,
    "retest": None,
}
"""What the seed's users may ask for, too; nothing is measured anew, so `retest` changes nothing."""


@dataclass(frozen=True)
class MoeLayer:
    """The experts of a layer, and how many of them a token uses."""

    experts: LayerExperts
    n_used: int


@dataclass(frozen=True)
class ExpertPlan:
    """Of one GPU.

    slots        experts of each of its MoE layers that have a place there
    n_bytes      that the places take
    fetch_bytes  that prompts' experts take besides; 0: prompts fetch none
    reason       in words
    """

    holding: Holding
    slots: tuple[int, ...]
    n_bytes: int
    fetch_bytes: int
    reason: str

    def halved(self) -> ExpertPlan:
        """With half of the slots, since memory was short."""
        slots = tuple(n // 2 for n in self.slots)
        n_bytes = self.n_bytes * sum(slots) // max(sum(self.slots), 1)
        return replace(self, slots=slots, n_bytes=n_bytes, reason="memory was short")

    @property
    def moves(self) -> bool:
        """Whether the GPU reads experts from host memory, which is best pinned for that."""
        return self.fetch_bytes > 0 or (self.holding is Holding.CACHE and self.n_bytes > 0)


def moe_layers_of(weights: Mapping[str, Weight], blocks: Sequence[MoeSpec]) -> list[MoeLayer]:
    return [MoeLayer(layer_experts(weights, block), block.n_used) for block in blocks]


def all_experts(layers: Sequence[MoeLayer], n_bytes: int) -> ExpertPlan:
    """All of them, in n_bytes."""
    slots = tuple(layer.experts.n_expert for layer in layers)
    reason = "all experts fit" if layers else "the layers have no routed experts"
    return ExpertPlan(Holding.ALL, slots, n_bytes, 0, reason)


def some_experts(
    parts: Sequence[Sequence[MoeLayer]],
    rooms: Sequence[int],
    settings: GPUSettings,
    *,
    pinned: bool = True,
    known: Sequence[KnownUse | None] | None = None,
) -> list[ExpertPlan]:
    """Of GPUs that cannot hold all of theirs, or are not to: their MoE layers, and bytes left.

    pinned  the GPU can read experts in host memory: else prompts fetch none, and swaps take the way
            through a buffer
    known   of each GPU: of its experts, from earlier runs
    """
    both = list(zip(parts, rooms, strict=True))
    fetches = (
        pinned
        and settings.max_step_tokens >= FETCHED_TOKENS
        and all(_fetch_bytes(layers) <= FETCH_SHARE * room for layers, room in both)
    )
    plans = []
    for index, (layers, room) in enumerate(both):
        fetched = _fetch_bytes(layers) if fetches else 0
        left = max(room - fetched, 0)
        of_these = None if known is None else known[index]
        plans.append(_one_gpus(layers, left, fetched, settings, of_these))
    return plans


def _one_gpus(
    layers: Sequence[MoeLayer],
    room: int,
    fetched: int,
    settings: GPUSettings,
    known: KnownUse | None,
) -> ExpertPlan:
    wanted, mode = settings.moe_expert_cache, expert_mode(settings)
    even = even_slots(layers, room)
    if wanted != -1:
        most = min(max(even, default=0), wanted)
        slots = tuple(min(most, layer.experts.n_expert) for layer in layers)
        holding = Holding.CACHE if most else Holding.NONE
        reason = "as asked for" if most == wanted else f"{wanted} were asked for, so many fit"
        return ExpertPlan(holding, slots, slots_bytes(layers, slots), fetched, reason)
    whole = whole_layer_slots(layers, room)
    if not any(whole) and not any(even):
        reason = "no room is left beside what every token needs"
        return ExpertPlan(Holding.NONE, even, 0, fetched, reason)
    if mode is not None:
        slots = whole if mode is Holding.LAYERS else even
        return ExpertPlan(mode, slots, slots_bytes(layers, slots), fetched, "asked for")
    cached = predicted_us(layers, expected_hits(layers, even, known), swaps=True)
    layered = predicted_us(
        layers,
        [n / max(layer.experts.n_expert, 1) for n, layer in zip(whole, layers, strict=True)],
        whole=True,
    )
    if layered < cached or not any(even):
        slots, holding = whole, Holding.LAYERS
        other = "with some experts of every layer"
        chosen_us, other_us = layered, cached
    else:
        slots, holding = even, Holding.CACHE
        other = "with whole layers"
        chosen_us, other_us = cached, layered
    reason = (
        f"by prediction misses take {chosen_us / 1e3:.2f} ms a token, {other_us / 1e3:.2f} {other}"
    )
    return ExpertPlan(holding, slots, slots_bytes(layers, slots), fetched, reason)


def expert_mode(settings: GPUSettings) -> Holding | None:
    """What was asked for, if anything.  Raises: ConfigError."""
    word = dict(settings.moe_cache).get("mode") or environment("LLAMA_MOE_AUTO_MODE") or "auto"
    if word not in MODES:
        raise ConfigError(
            f"mode = {word[:40]!r} of the expert cache: use one of {', '.join(MODES)}"
        )
    return MODES[word]


def even_slots(layers: Sequence[MoeLayer], room: int) -> tuple[int, ...]:
    """As many of every layer as fit."""
    a_layer_each = sum(layer.experts.slot_bytes for layer in layers)
    n = room // a_layer_each if a_layer_each else 0
    return tuple(min(n, layer.experts.n_expert) for layer in layers)


def whole_layer_slots(layers: Sequence[MoeLayer], room: int) -> tuple[int, ...]:
    """All of the first layers, and of the next one what is left room for."""
    slots = []
    for layer in layers:
        n = min(layer.experts.n_expert, room // layer.experts.slot_bytes)
        room = room - n * layer.experts.slot_bytes if n == layer.experts.n_expert else 0
        slots.append(n)
    return tuple(slots)


def slots_bytes(layers: Sequence[MoeLayer], slots: Sequence[int]) -> int:
    return sum(n * layer.experts.slot_bytes for n, layer in zip(slots, layers, strict=True))


def expected_hits(
    layers: Sequence[MoeLayer],
    slots: Sequence[int],
    known: KnownUse | None,
) -> list[float]:
    """Share of each layer's uses that find the expert in a slot of a cache that follows use.

    Caches of 5 to 90 % of the experts serve about the cube root of their share (replays of
    published routing and runs, see docs/memory.md); one of less than two tokens' experts loses some
    before they are used again.  Earlier uses say what experts that never move would serve.  What a
    cache served lately says how far that is from the truth: that cache is expected to serve the
    same again, and another one to be as much better or worse (see docs/routing.md).
    """
    expected = _hits_by_rule(layers, slots, None if known is None else known.uses)
    if known is None or known.served is None or not layers:
        return expected
    share, rate = known.served
    then = [round(share * layer.experts.n_expert) for layer in layers]
    ruled = _mean(layers, _hits_by_rule(layers, then, known.uses))
    if not (0.0 < ruled < 1.0 and 0.0 < share < 1.0):
        return expected
    off = math.log(min(max(rate, 0.01), 0.999)) / math.log(ruled)
    return [hit ** min(max(off, 1 / MOST_OFF), MOST_OFF) for hit in expected]


def _mean(layers: Sequence[MoeLayer], hits: Sequence[float]) -> float:
    """Of all uses by a token."""
    n_used = sum(layer.n_used for layer in layers)
    return sum(layer.n_used * hit for layer, hit in zip(layers, hits, strict=True)) / n_used


def _hits_by_rule(
    layers: Sequence[MoeLayer],
    slots: Sequence[int],
    uses: NDArray[np.integer] | None,
) -> list[float]:
    """Without what a cache served."""
    hits = []
    for index, (n, layer) in enumerate(zip(slots, layers, strict=True)):
        share = n / max(layer.experts.n_expert, 1)
        kept = min(n / (2 * layer.n_used), 1.0)
        expected = share**HITS_EXPONENT * kept**KEPT_EXPONENT
        if uses is not None and index < len(uses) and uses[index].any():
            counts = np.sort(uses[index])[::-1]
            expected = max(expected, float(counts[:n].sum() / counts.sum()))
        hits.append(expected)
    return hits


def predicted_us(
    layers: Sequence[MoeLayer], hits: Sequence[float], *, swaps: bool = False, whole: bool = False
) -> float:
    """Microseconds a token for what the GPU misses.

    swaps: experts are copied meanwhile;  whole: a layer hits with all its experts or with none
    """
    total = n_misses = bytes_read = 0.0
    for layer, hit in zip(layers, hits, strict=True):
        expert_us = sum(m.n_bytes for m in layer.experts.matrices) / READ_GBS / 1e3
        missed = layer.n_used * (1 - hit)
        exchanged = 1 - hit if whole else 1 - hit**layer.n_used
        total += exchanged * HANDOVER_US + missed * expert_us
        n_misses += missed
        bytes_read += missed * expert_us
    if swaps and n_misses:
        total += min(SWAPS_A_TOKEN, n_misses) * bytes_read / n_misses
    return total


def _fetch_bytes(layers: Sequence[MoeLayer]) -> int:
    return fetch_bytes([layer.experts for layer in layers])
