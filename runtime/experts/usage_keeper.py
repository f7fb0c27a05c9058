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

from runtime.experts.cache import Expert, ExpertCache
from runtime.experts.policies import policy_from_environment
from runtime.experts.policy import Policy, Swap
from runtime.experts.scored_policy import I32, I64, ScoredPolicy
from runtime.experts.usage import LifetimeUsage


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
        self._policies: list[tuple[slice, ScoredPolicy]] = []
        self._saved: I64 = usage.known.astype(np.int64)
        self._saved_tokens = 0
        self._thread: threading.Thread | None = None

    def policy(self, layers: slice = slice(None)) -> Callable[[ExpertCache], Policy]:
        """What makes the policy for a cache of these MoE layers of the model."""
        usage = self._usage
        make = policy_from_environment(usage.known[layers], usage.known_tokens, self._given)

        def kept(cache: ExpertCache) -> Policy:
            policy = make(cache)
            self._policies.append((layers, policy))
            return _Kept(policy, self)

        return kept

    def save_if_due(self) -> None:
        """Start to save, on a thread, if it is time; microseconds if not."""
        if self._usage.due(self._clock()) and (self._thread is None or not self._thread.is_alive()):
            uses, n_tokens, now = self._new()
            self._usage.saved_at = now
            self._thread = threading.Thread(
                target=self._usage.save, args=(uses, n_tokens, now), name="expert usage"
            )
            self._thread.start()

    def close(self) -> None:
        """Save what is left.  Blocks for a disk."""
        if self._thread is not None:
            self._thread.join()
        self._usage.save(*self._new())

    def _new(self) -> tuple[NDArray[np.int64], int, float]:
        """Uses and tokens since the last call, and the time."""
        total = self._saved.copy()
        n_tokens = 0
        for layers, policy in self._policies:
            life = policy.life.reshape(policy.shape)
            total[layers, : life.shape[1]] = life
            n_tokens = max(n_tokens, policy.n_tokens)
        new = total - self._saved, n_tokens - self._saved_tokens, self._clock()
        self._saved, self._saved_tokens = total, n_tokens
        return new


class _Kept:
    """A policy whose keeper looks at the clock now and then."""

    def __init__(self, policy: ScoredPolicy, keeper: UsageKeeper) -> None:
        self._policy, self._keeper = policy, keeper

    def used(self, choices: I32) -> None:
        self._policy.used(choices)
        self._keeper.save_if_due()

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        return self._policy.first(cache)

    def swaps(self, cache: ExpertCache, most: int) -> list[Swap]:
        return self._policy.swaps(cache, most)
