"""Which experts the GPU should hold: decided from what recent tokens used. Pure.

A policy sees every step's choices and proposes swaps; the cache carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.experts.cache import Expert, ExpertCache, Rows

I32 = NDArray[np.int32]


class Policy(Protocol):
    """Decides; see `runtime.experts.scored_policy` for those that there are."""

    def used(self, choices: I32) -> None:
        """Tokens used these experts: i32[n_layers, n_tokens, n_used]; -1: none."""
        ...

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """Experts to start with, best first, more than there are slots."""
        ...

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        """Up to `most` swaps that are worth their upload now, best first, as `ExpertCache.swap`
        takes them.  Good until the next call."""
        ...
