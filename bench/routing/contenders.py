"""What the lab compares: policies with their settings, and ways to divide the slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.routing.bounds import lru_curves
from bench.routing.rates import Rates
from bench.routing.replay import Slots, layer_slots, shared_slots
from profiles import RoutingTrace
from runtime.experts.cache import ExpertCache
from runtime.experts.policies import POLICIES
from runtime.experts.policy import Policy
from runtime.experts.scored_policy import PolicySettings

MakeSlots = Callable[[RoutingTrace, float], Slots]
LOOK_TOKENS = 512
"""Tokens from which `marginal_slots` learns."""


def equal_slots(trace: RoutingTrace, share: float) -> Slots:
    """As many for every layer, each alone: the seed's way."""
    return layer_slots(trace, [max(1, round(share * n)) for n in trace.n_expert])


def marginal_slots(trace: RoutingTrace, share: float) -> Slots:
    """For each layer alone, but slot by slot to the layer whose LRU hits the next one adds most
    to, by the trace's first tokens."""
    curves = lru_curves(trace.token_by_token(0, LOOK_TOKENS))
    order = sorted(
        (-gain, slot, layer)
        for layer, curve in enumerate(curves)
        for slot, gain in enumerate(falling_gains(curve[: trace.n_expert[layer] + 1]))
    )
    counts = [1] * trace.n_layers
    left = sum(max(1, round(share * n)) for n in trace.n_expert) - trace.n_layers
    for _, _, layer in order:
        if left and counts[layer] < trace.n_expert[layer]:
            counts[layer] += 1
            left -= 1
    return layer_slots(trace, counts)


DEFAULTS = PolicySettings()


def falling_gains(curve: NDArray[np.float64]) -> list[float]:
    """What each slot adds on the way along the curve's upper hull: never more than the one before,
    so that slots which pay only together are bought together."""
    gains: list[float] = []
    at, last = 0, len(curve) - 1
    while at < last:
        slopes = (curve[at + 1 :] - curve[at]) / np.arange(1, last - at + 1)
        n = int(np.argmax(slopes)) + 1
        gains += [float(slopes[n - 1])] * n
        at += n
    return gains


@dataclass(frozen=True)
class Contender:
    """A policy by name, what it is told, and how its slots are divided."""

    policy: str
    settings: PolicySettings = DEFAULTS
    slots: MakeSlots = shared_slots
    ruled: bool = False
    """The margin is the seed's rule: as many uses as an upload takes CPU evaluations."""

    def make(self, rates: Rates) -> Callable[[ExpertCache], Policy]:
        settings = self.settings
        if self.ruled:
            settings = replace(settings, margin=float(max(1, math.ceil(rates.cpu / rates.link))))

        def policy(cache: ExpertCache) -> Policy:
            return POLICIES[self.policy](cache, settings)

        return policy


def plain(**settings: float) -> PolicySettings:
    return PolicySettings(**settings)  # type: ignore[arg-type]


CONTENDERS = {
    "fitted (default)": Contender("fitted"),
    "fitted, equal layers": Contender("fitted", slots=equal_slots),
    "fitted, marginal layers": Contender("fitted", slots=marginal_slots),
    "fitted, margin 0": Contender("fitted", plain(margin=0.0)),
    "lrfu 16": Contender("lrfu", plain(half_life=16.0)),
    "lrfu 64": Contender("lrfu", plain(half_life=64.0)),
    "lrfu 256": Contender("lrfu", plain(half_life=256.0)),
    "lrfu 64, any miss": Contender("lrfu", plain(admission=0)),
    "lru": Contender("lru", plain(admission=0)),
    "lru, 2 uses": Contender("lru"),
    "lru-2": Contender("lru-2", plain(admission=0)),
    "slru": Contender("slru", plain(admission=0)),
    "lfru": Contender("lfru", plain(admission=0)),
    "lfu, halved at 64": Contender("halve"),
    "lfu, halved at 1024": Contender("halve", plain(half_life=1024.0)),
    "window": Contender("window"),
    "window, 3 uses": Contender("window", plain(admission=3)),
    "add": Contender("add"),
    "add, sticky 0.3": Contender("add", plain(sticky=0.3)),
    "hybrid": Contender("hybrid"),
    "seed": Contender("add", slots=equal_slots),
    "seed, first release": Contender("add", plain(admission=0), equal_slots, ruled=True),
}
