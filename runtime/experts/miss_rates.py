"""MissRates: what a missed expert costs, by who serves it; and which way is the quickest.  Pure.

A layer's missed experts go to the CPU team, which reads them from the host's memory. Every n'th of
them may be read in place by the GPU meanwhile, over the link, or be copied to the GPU first, which
takes the link as long. Both come out of the same memory, so what each takes is known alone and
beside the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

EVERY = (2, 3, 4)
"""Rules that are tried: each so many'th miss of a layer is read in place."""
LEAST_GAIN = 0.03
"""Of the time that misses take: a rule that is expected to gain less is not worth it."""


@dataclass(frozen=True)
class MissRates:
    """Microseconds, measured.

    cpu     of 1, 2, ... missed experts of a layer by the team; more take as much each as the last
            ones did
    beside  the same while the link carries experts
    link    an expert over the link alone; 0: it cannot carry any yet
    link_beside  the same while the team computes
    """

    cpu: tuple[float, ...]
    beside: tuple[float, ...] = ()
    link: float = 0.0
    link_beside: float = 0.0

    def on_cpu(self, n: int, *, beside: bool = False) -> float:
        """n missed experts of a layer, by the team."""
        known = self.beside if beside else self.cpu
        if n == 0 or not known:
            return 0.0
        if n <= len(known):
            return known[n - 1]
        each = known[-1] - known[-2] if len(known) > 1 else known[-1]
        return known[-1] + (n - len(known)) * max(each, 0.0)

    def of_layer(self, n: int, every: int) -> float:
        """n missed experts, each `every`th read over the link; 0: none is."""
        n_link = n // every if every else 0
        if n_link == 0:
            return self.on_cpu(n)
        return max(self.on_cpu(n - n_link, beside=True), n_link * self.link_beside)

    def of_token(self, misses: F64, every: int) -> float:
        """misses: f64[n_used + 1], how many of a token's layers miss 0, 1, ... experts."""
        return float(sum(n * self.of_layer(i, every) for i, n in enumerate(misses)))

    def best(self, misses: F64) -> int:
        """The rule that is expected to gain most, if it gains `LEAST_GAIN`; else 0, the CPU."""
        if not self.link_beside or not self.beside:
            return 0
        alone = self.of_token(misses, 0)
        found = min(EVERY, key=lambda every: self.of_token(misses, every))
        return found if self.of_token(misses, found) < (1 - LEAST_GAIN) * alone else 0

    def corrected(self, cpu: float, link: float) -> MissRates:
        """With what the team and the link take now, as shares of what they took then."""
        return replace(
            self,
            cpu=tuple(cpu * us for us in self.cpu),
            beside=tuple(cpu * us for us in self.beside),
            link=link * self.link,
            link_beside=link * self.link_beside,
        )

    def describe(self) -> dict[str, object]:
        """For people."""
        told: dict[str, object] = {"cpu_us": [round(us, 1) for us in self.cpu]}
        if self.link:
            told["cpu_us_beside_the_link"] = [round(us, 1) for us in self.beside]
            told["link_us"] = round(self.link, 1)
            told["link_us_beside_the_cpu"] = round(self.link_beside, 1)
        return told


def rising(us: Sequence[float]) -> tuple[float, ...]:
    """The times of 1, 2, ... experts without what only a disturbance explains: more take longer."""
    found = np.minimum.accumulate(np.array(us, np.float64)[::-1])[::-1]
    return tuple(found.tolist())


def spread_misses(hits: Sequence[float], n_used: Sequence[int]) -> F64:
    """f64[most used + 1]: how many of a token's layers miss 0, 1, ... experts, where each layer
    hits with its own share of its uses, independently of each other."""
    misses = np.zeros(max(n_used, default=0) + 1)
    for hit, n in zip(hits, n_used, strict=True):
        for i in range(n + 1):
            misses[i] += comb(n, i) * (1 - hit) ** i * hit ** (n - i)
    return misses
