"""UsageKeeper: policies that begin with what is known of a model, and the model's profile kept.

keeper = UsageKeeper(lifetime_usage(model))
CachedExperts(..., policy=keeper.policy(slice(first, last)))    # for each GPU: its MoE layers
keeper.close()                                                  # after the last step
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from profiles import HALF_LIVES, RecentUse
from runtime.experts.cache import NO_SLOT, Expert, ExpertCache, Rows
from runtime.experts.policies import policy_from_environment
from runtime.experts.policy import Policy
from runtime.experts.scored_policy import I32, I64, ScoredPolicy
from runtime.experts.usage import LifetimeUsage

LOOK_EVERY = 4
"""Steps from one look at what the cache serves, and at the clock, to the next."""
FADING = 0.98
"""What a look leaves of the ones before: half after 140 steps."""
SERVED_TOKENS = 256
"""Without so many tokens a cache is still filling."""


class UsageKeeper:
    """Counts what its policies see; saves every few minutes from a thread, and when closed."""

    def __init__(
        self,
        usage: LifetimeUsage,
        clock: Callable[[], float] = time.monotonic,
        given: Mapping[str, str] | None = None,
    ) -> None:
        """given: settings of the policies before those of the environment.

        Raises: ConfigError for settings that name no policy; see `policy_from_environment`.
        """
        self._usage, self._clock = usage, clock
        usage.saved_at = clock()
        self._given = dict(given or {})
        policy_from_environment(given=self._given)
        self._kept: list[tuple[slice, _Kept]] = []
        self._saved: I64 = usage.known.astype(np.int64)
        self._saved_tokens = 0
        self._thread: threading.Thread | None = None

    def policy(self, layers: slice = slice(None)) -> Callable[[ExpertCache], Policy]:
        """What makes the policy for a cache of these MoE layers of the model."""
        usage = self._usage
        recent = None if usage.recent is None else usage.recent.part(layers)
        make = policy_from_environment(usage.known[layers], usage.known_tokens, self._given, recent)

        def kept(cache: ExpertCache) -> Policy:
            kept = _Kept(make(cache), cache, self)
            self._kept.append((layers, kept))
            return kept

        return kept

    def save_if_due(self) -> None:
        """Start to save, on a thread, if it is time; microseconds if not."""
        if self._usage.due(self._clock()) and (self._thread is None or not self._thread.is_alive()):
            new = self._new()
            self._usage.saved_at = new[2]
            self._thread = threading.Thread(target=self._usage.save, args=new, name="expert usage")
            self._thread.start()

    def close(self) -> None:
        """Save what is left.  Blocks for a disk."""
        if self._thread is not None:
            self._thread.join()
        self._usage.save(*self._new())

    def _new(self) -> tuple[NDArray[np.int64], int, float, RecentUse | None]:
        """Uses and tokens since the last call, the time, and what the last tokens used."""
        total = self._saved.copy()
        n_tokens = 0
        for layers, kept in self._kept:
            policy = kept.policy
            life = policy.life.reshape(policy.shape)
            total[layers, : life.shape[1]] = life
            n_tokens = max(n_tokens, policy.n_tokens)
        new = total - self._saved, n_tokens - self._saved_tokens, self._clock(), self._recent()
        self._saved, self._saved_tokens = total, n_tokens
        return new

    def _recent(self) -> RecentUse | None:
        """Of all policies together; None: they do not keep it.  Layers without a policy, whose
        experts are all on a GPU, keep what was known."""
        known = self._usage.recent
        shape = len(HALF_LIVES), *self._usage.known.shape
        rates = np.zeros(shape, np.float32) if known is None else known.rates.copy()
        fits, weights = [], []
        for layers, kept in self._kept:
            recent = kept.policy.recent()
            if recent is None:
                return None
            rates[:, layers, : recent.rates.shape[2]] = recent.rates
            fits.append(recent.fit)
            weights.append(kept.policy.n_cells)
        if not fits:
            return None
        fit = np.average(fits, axis=0, weights=weights).tolist()
        return RecentUse(rates, tuple(fit), self._served())

    def _served(self) -> tuple[float, float] | None:
        """By all caches together; what was known, where they have not served enough."""
        known = self._usage.recent
        hits = sum(kept.n_hits for _, kept in self._kept)
        uses = sum(kept.n_uses for _, kept in self._kept)
        held = sum(kept.cache.n_slots for _, kept in self._kept)
        n_experts = sum(layer.n_expert for _, kept in self._kept for layer in kept.cache.layers)
        if min(kept.n_tokens for _, kept in self._kept) < SERVED_TOKENS or not uses:
            return None if known is None else known.served
        return min(held / n_experts, 1.0), hits / uses


class _Kept:
    """A policy whose keeper looks at the clock now and then, and what its cache serves.

    n_hits, n_uses  of some tokens, older ones fading; n_tokens: all that the policy has seen since
                    it was first asked for swaps, without which nothing follows use, and since the
                    cache has the slots that it has
    """

    def __init__(self, policy: ScoredPolicy, cache: ExpertCache, keeper: UsageKeeper) -> None:
        self.policy, self.cache, self._keeper = policy, cache, keeper
        self.n_hits = self.n_uses = 0.0
        self.n_tokens = self._n_calls = 0
        self._n_slots = cache.n_slots
        self._swaps = False
        self._rows = np.arange(len(cache.layers))[:, None, None]

    def used(self, choices: I32) -> None:
        if self.cache.n_slots != self._n_slots:
            self._n_slots = self.cache.n_slots
            self.n_hits = self.n_uses = 0.0
            self.n_tokens = 0
        if self._swaps:
            self.n_tokens += choices.shape[1]
        self.policy.used(choices)
        self._n_calls += 1
        if self._n_calls % LOOK_EVERY == 1:
            if self._swaps:
                self._look(choices[:, -1:])
            self._keeper.save_if_due()

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        return self.policy.first(cache)

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        self._swaps = True
        return self.policy.swaps(cache, most)

    def _look(self, choices: I32) -> None:
        """What became of a token."""
        used = choices >= 0
        found = used & (self.cache.slot_of[self._rows, choices] != NO_SLOT)
        self.n_hits = FADING * self.n_hits + int(np.count_nonzero(found))
        self.n_uses = FADING * self.n_uses + int(np.count_nonzero(used))
