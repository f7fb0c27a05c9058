"""Policies of the expert cache by name: what is in a slot stays while its score is high.

What differs is the score. `bench/routing` replays recorded routing through them; docs/routing.md
has the results, and why `fitted` is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from profiles import RecentUse
from runtime.config import environment
from runtime.errors import ConfigError
from runtime.experts.cache import NO_SLOT, ExpertCache
from runtime.experts.fitted_policy import FittedPolicy
from runtime.experts.scored_policy import F64, I64, U64, Bools, PolicySettings, ScoredPolicy

RESCALE = 2.0**500


class RecencyFrequency(ScoredPolicy):
    """LRFU: the sum of all uses, each worth half after `half_life` tokens.

    A short half-life is LRU, an endless one LFU. Scores grow instead of decaying, so a token
    touches only the cells that it used.
    """

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._worth = 1.0
        self._growth = 2.0 ** (1.0 / settings.half_life)
        uses_before = max(settings.admission - 1, 0)
        self._admitted_from = 1.0 + uses_before * 2.0 ** (-settings.window / settings.half_life)

    def _count(self, cells: I64) -> None:
        self._worth *= self._growth
        if self._worth > RESCALE:
            self.scores /= self._worth
            self._worth = 1.0
            self._victims.clear()
        self.scores[cells] += self._worth

    def _admitted(self, cells: I64) -> Bools:
        admitted: Bools = self.scores[cells] >= self._admitted_from * self._worth
        return admitted


class LeastRecent(ScoredPolicy):
    """LRU: when it was used last."""

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self.before: F64 = np.full(self.n_cells, -np.inf)
        """When it was used the last time but one."""

    def _count(self, cells: I64) -> None:
        self.before[cells] = self.scores[cells]
        self.scores[cells] = self.n_tokens

    def _admitted(self, cells: I64) -> Bools:
        since = self.n_tokens - self.settings.window if self.settings.admission > 1 else -np.inf
        admitted: Bools = self.before[cells] >= max(since, 1) if since > -np.inf else cells >= 0
        return admitted


class LeastRecent2(LeastRecent):
    """LRU-2: when it was used the last time but one."""

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.before[cells]
        return scores

    def _score(self, cell: int) -> float:
        return float(self.before[cell])


class Segmented(LeastRecent):
    """Segmented LRU: experts used again while in a slot are let go after the others, as long as
    they are no more than 4 of 5 slots."""

    SHARE = 0.8
    PROTECTED = 2.0**40

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._protected: Bools = np.zeros(self.n_cells, np.bool_)

    def _count(self, cells: I64) -> None:
        super()._count(cells)
        self._protected[cells] = self._slots[cells] != NO_SLOT

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells] + self.PROTECTED * self._protected[cells]
        return scores

    def _score(self, cell: int) -> float:
        return float(self.scores[cell]) + self.PROTECTED * bool(self._protected[cell])

    def _list(self, size_class: int) -> None:
        cells = self._residents(size_class)
        inside = cells[self._protected[cells]]
        n_over = len(inside) - int(self.SHARE * len(cells))
        if n_over > 0:
            oldest = np.argpartition(self.scores[inside], n_over - 1)[:n_over]
            self._protected[inside[oldest]] = False
        super()._list(size_class)


class Halved(ScoredPolicy):
    """LFU with aging: uses, all halved every `half_life` tokens (the seed's `halve`)."""

    def _count(self, cells: I64) -> None:
        self.scores[cells] += 1.0
        if self.n_tokens % int(self.settings.half_life) == 0:
            self.scores *= 0.5
            self._victims.clear()

    def _admitted(self, cells: I64) -> Bools:
        admitted: Bools = self.scores[cells] >= self.settings.admission
        return admitted


class FrequentRecent(LeastRecent):
    """LFRU: uses ever, over the tokens since the last one."""

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._uses: F64 = np.zeros(self.n_cells)

    def _count(self, cells: I64) -> None:
        super()._count(cells)
        self._uses[cells] += 1.0

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self._uses[cells] / (self.n_tokens + 1 - self.scores[cells])
        return scores

    def _score(self, cell: int) -> float:
        return float(self._uses[cell]) / (self.n_tokens + 1 - float(self.scores[cell]))


class Window(ScoredPolicy):
    """Uses by the last `window` tokens (the seed's `window`)."""

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._ring = [np.zeros(0, np.int64)] * settings.window

    def _count(self, cells: I64) -> None:
        at = self.n_tokens % len(self._ring)
        self.scores[self._ring[at]] -= 1.0
        self.scores[cells] += 1.0
        self._ring[at] = cells

    def _admitted(self, cells: I64) -> Bools:
        admitted: Bools = self.scores[cells] >= self.settings.admission
        return admitted


class WindowLife(Window):
    """The window's uses plus `global_weight` times the share of the layer's most used expert (the
    seed's `add`)."""

    SHARES_EVERY = 8

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        super().__init__(cache, settings)
        self._shares: F64 = np.zeros(self.n_cells)

    def _after_token(self) -> None:
        if self.n_tokens % self.SHARES_EVERY == 1:
            life = self.life.reshape(-1, self._n_expert)
            most = np.maximum(life.max(axis=1, keepdims=True), 1)
            self._shares = (life / most).reshape(-1)

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells] + self.settings.global_weight * self._shares[cells]
        return scores

    def _score(self, cell: int) -> float:
        share = float(self._shares[cell])
        return float(self.scores[cell]) + self.settings.global_weight * share


class WindowTimesLife(WindowLife):
    """The window's uses times that share (the seed's `hybrid`)."""

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells] * self._shares[cells]
        return scores

    def _score(self, cell: int) -> float:
        return float(self.scores[cell]) * float(self._shares[cell])


POLICIES: Mapping[str, Callable[[ExpertCache, PolicySettings], ScoredPolicy]] = {
    "fitted": FittedPolicy,
    "lrfu": RecencyFrequency,
    "lru": LeastRecent,
    "lru-2": LeastRecent2,
    "slru": Segmented,
    "lfru": FrequentRecent,
    "halve": Halved,
    "window": Window,
    "add": WindowLife,
    "hybrid": WindowTimesLife,
}

DEFAULT_POLICY = "fitted"

VARIABLES: tuple[tuple[str, str, Callable[[str], float]], ...] = (
    ("LLAMA_MOE_CACHE_WINDOW", "window", int),
    ("LLAMA_MOE_CACHE_ADMIT", "admission", int),
    ("LLAMA_MOE_CACHE_MARGIN", "margin", float),
    ("LLAMA_MOE_CACHE_STICKY", "sticky", float),
    ("LLAMA_MOE_CACHE_GLOBAL_WEIGHT", "global_weight", float),
    ("LLAMA_MOE_CACHE_HALVE_EVERY", "half_life", float),
)
"""(environment variable, field of `PolicySettings`, type): the seed's names."""


def default_policy(cache: ExpertCache) -> ScoredPolicy:
    """The default, as it is if nothing is set or known."""
    return POLICIES[DEFAULT_POLICY](cache, PolicySettings())


def policy_from_environment(
    known: U64 | None = None,
    n_tokens: int = 0,
    given: Mapping[str, str] | None = None,
    recent: RecentUse | None = None,
) -> Callable[[ExpertCache], ScoredPolicy]:
    """What makes the policy that LLAMA_MOE_CACHE_POLICY names, else the default, for a cache.

    given  values that count before those of LLAMA_MOE_CACHE_..., by the names' ends
    known  uses by n_tokens earlier tokens, u64[n_layers, n_expert]
    recent by the last of them, where that is known
    Raises: ConfigError for an unknown name or a value that cannot be.
    """

    def setting(variable: str) -> str | None:
        ending = variable.removeprefix("LLAMA_MOE_CACHE_").lower()
        return (given or {}).get(ending) or environment(variable)

    name = setting("LLAMA_MOE_CACHE_POLICY") or DEFAULT_POLICY
    if name not in POLICIES:
        raise ConfigError(
            f"LLAMA_MOE_CACHE_POLICY = {name[:40]!r}: use one of {', '.join(POLICIES)}"
        )
    numbers: dict[str, float] = {}
    for variable, field, kind in VARIABLES:
        text = setting(variable)
        if text is not None:
            numbers[field] = _number(variable, text, kind)
    settings = replace(PolicySettings(), **numbers)  # type: ignore[arg-type]

    def make(cache: ExpertCache) -> ScoredPolicy:
        policy = POLICIES[name](cache, settings)
        if known is not None and known.any():
            n_expert = cache.slot_of.shape[1]
            last = None if recent is None else recent.part(slice(None), n_expert)
            policy.know(known[:, :n_expert], n_tokens, last)
        return policy

    return make


def _number(variable: str, text: str, kind: Callable[[str], float]) -> float:
    """Raises: ConfigError."""
    try:
        value = kind(text)
    except ValueError:
        value = -1.0
    lowest = 0.0 if variable.endswith(("MARGIN", "ADMIT", "STICKY", "WEIGHT")) else 1.0
    if not lowest <= value < 1e6:
        raise ConfigError(f"{variable} = {text[:40]!r}: use a number of at least {lowest:g}")
    return value
