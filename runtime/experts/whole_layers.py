"""WholeLayers: a policy for slots that hold all experts of the first layers, for good.

Where so little of a model fits that a cache of every layer would miss in every layer anyway, layers
that never miss save the whole way to the CPU and back.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.experts.cache import NO_ROWS, Expert, ExpertCache, Rows
from runtime.experts.policy import I32, Policy


class WholeLayers:
    """Uses still count for `policy`, which keeps the profile."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def used(self, choices: I32) -> None:
        self._policy.used(choices)

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """Layer after layer."""
        for layer, shape in enumerate(cache.layers):
            for expert in range(shape.n_expert):
                yield layer, expert

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        """None: what is there stays."""
        return NO_ROWS
