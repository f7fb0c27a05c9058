"""Policies of the expert cache by name: each keeps in the slots what has the highest score.

What differs is the score. All see the same tokens, may bring an expert only right after it was
missed, and never stop a step: a miss is computed elsewhere meanwhile. `bench/routing` replays
recorded routing through them; docs/routing.md has the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.experts.cache import NO_SLOT, Expert, ExpertCache
from runtime.experts.policy import Policy, Swap

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

CELLS_A_TOKEN = 768
"""Cells that the search for victims may look at a token, on average: 6 us."""
VICTIMS_A_TOKEN = 16
"""Swaps that its list suffices for."""
UNCOUNTED_TOKENS = 32
RESCALE = 2.0**500


@dataclass(frozen=True)
class PolicySettings:
    """What a policy may be told; the seed's names in brackets.

    window         tokens that count as recent (window, recent)
    admission      recent uses from which on a missed expert may get a slot; 0 and 1: any (admit)
    margin         score by which a newcomer must beat its victim (margin, swap-lead)
    sticky         share of the slots whose experts stay: the most used ever (sticky, stay-bonus)
    global_weight  weight of lifetime use against recent use (global-weight)
    half_life      tokens after which a use counts half
    """

    window: int = 64
    admission: int = 2
    margin: float = 0.0
    sticky: float = 0.0
    global_weight: float = 16.0
    half_life: float = 64.0


class ScoredPolicy:
    """Brings the missed experts of the highest scores, for the residents of the lowest.

    A subclass keeps `scores`, or computes it: see `_count` and `_scores`. Cells are numbers of
    experts over all layers: layer * n_expert + expert.
    """

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        n_layers, self._n_expert = cache.slot_of.shape
        self.settings = settings
        self.n_cells = n_layers * self._n_expert
        self.n_tokens = 0
        self.scores: F64 = np.zeros(self.n_cells)
        self._life: I64 = np.zeros(self.n_cells, np.int64)
        self._uncounted: list[I64] = []
        self._slots = cache.slot_of.reshape(-1)
        self._coming = cache.coming.reshape(-1)
        self._classes = np.repeat(cache.layer_classes, self._n_expert)
        self._class_of = self._classes.tolist()
        self._bases = (np.arange(n_layers, dtype=np.int64) * self._n_expert)[:, None]
        self._recent: list[I64] = []
        self._victims: dict[int, deque[tuple[int, float]]] = {}
        self._listed_at: dict[int, int] = {}
        self._going: set[int] = set()
        """Victims of swaps that are being proposed: the cache does not know yet."""
        self._list_every = max(8, self.n_cells // CELLS_A_TOKEN)

    @property
    def life(self) -> I64:
        """Uses ever, i64[n_cells]; those of earlier runs may be added."""
        if self._uncounted:
            cells = np.concatenate(self._uncounted)
            self._life += np.bincount(cells, minlength=self.n_cells)
            self._uncounted.clear()
        return self._life

    def used(self, choices: I32) -> None:
        """See `Policy.used`."""
        whole = int(choices.min(initial=0)) >= 0
        for token in range(choices.shape[1]):
            cells = (choices[:, token] + self._bases).reshape(-1)
            if not whole:
                cells = cells[choices[:, token].reshape(-1) >= 0]
            self.n_tokens += 1
            self._count(cells)
            self._recent.append(cells)
            self._uncounted.append(cells)
        if len(self._uncounted) >= UNCOUNTED_TOKENS:
            _ = self.life

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """The most used ever; of those used equally, the first experts of every layer in turn."""
        order = np.lexsort((self._expert_numbers(), -self.life))
        n_expert = [layer.n_expert for layer in cache.layers]
        for cell in order.tolist():
            layer, expert = divmod(cell, self._n_expert)
            if expert < n_expert[layer]:
                yield layer, expert

    def swaps(self, cache: ExpertCache, most: int) -> list[Swap]:
        """See `Policy.swaps`."""
        recent, self._recent = self._recent, []
        if most <= 0 or not recent:
            return []
        cells = recent[0] if len(recent) == 1 else np.unique(np.concatenate(recent))
        missed = cells[self._slots[cells] == NO_SLOT]
        wanted = missed[self._admitted(missed)]
        if not len(wanted):
            return []
        scores = self._scores(wanted)
        order = np.argsort(-scores, kind="stable").tolist()
        return self._paired(cache, wanted[order].tolist(), scores[order].tolist(), most)

    def _paired(
        self, cache: ExpertCache, wanted: list[int], scores: list[float], most: int
    ) -> list[Swap]:
        """Swaps for the wanted cells, best first, as far as they are worth it."""
        swaps: list[Swap] = []
        n_free: dict[int, int] = {}
        full: set[int] = set()
        self._going.clear()
        for cell, score in zip(wanted, scores, strict=True):
            size_class = self._class_of[cell]
            if size_class in full or self._coming[cell]:
                continue
            if n_free.setdefault(size_class, cache.n_free(size_class)):
                n_free[size_class] -= 1
                swaps.append(Swap(self._expert(cell), None))
            else:
                victim = self._victim(size_class, score - self.settings.margin)
                if victim is None:
                    full.add(size_class)
                    continue
                self._going.add(victim)
                swaps.append(Swap(self._expert(cell), self._expert(victim)))
            if len(swaps) == most:
                break
        return swaps

    def _count(self, cells: I64) -> None:
        """A token used these cells, each once."""
        raise NotImplementedError

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells]
        return scores

    def _score(self, cell: int) -> float:
        return float(self.scores[cell])

    def _admitted(self, cells: I64) -> Bools:
        """Which of these cells, just missed, may get a slot."""
        return np.ones(len(cells), np.bool_)

    def _victim(self, size_class: int, below: float) -> int | None:
        """A cell in a slot of the class that scores less; a list of the lowest serves tokens."""
        while True:
            listed = self._victims.get(size_class)
            while listed:
                victim, then = listed[0]
                score = self._score(victim)
                gone = self._slots[victim] == NO_SLOT or victim in self._going
                if gone or (score >= below and score != then):
                    listed.popleft()  # or used since
                elif score < below:
                    listed.popleft()
                    return victim
                else:
                    return None
            age = self.n_tokens - self._listed_at.get(size_class, -self._list_every)
            if age < self._list_every:
                return None
            self._list(size_class)

    def _list(self, size_class: int) -> None:
        cells = np.flatnonzero((self._slots != NO_SLOT) & (self._classes == size_class))
        if self.settings.sticky:
            cells = self._without_sticky(cells)
        scores = self._scores(cells)
        n_listed = VICTIMS_A_TOKEN * self._list_every
        if len(cells) > n_listed:
            lowest = np.argpartition(scores, n_listed)[:n_listed]
            cells, scores = cells[lowest], scores[lowest]
        order = np.argsort(scores, kind="stable")
        listed = zip(cells[order].tolist(), scores[order].tolist(), strict=True)
        self._victims[size_class] = deque(listed)
        self._listed_at[size_class] = self.n_tokens

    def _without_sticky(self, cells: I64) -> I64:
        """Without the share of them that was used most."""
        n_sticky = int(self.settings.sticky * len(cells))
        order = np.argsort(-self.life[cells], kind="stable")
        return cells[np.sort(order[n_sticky:])]

    def _expert_numbers(self) -> I64:
        return np.arange(self.n_cells) % self._n_expert

    def _expert(self, cell: int) -> Expert:
        return divmod(cell, self._n_expert)


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
        cells = np.flatnonzero((self._slots != NO_SLOT) & (self._classes == size_class))
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

    def _life_share(self, cells: I64) -> F64:
        life = self.life
        most = life.reshape(-1, self._n_expert).max(axis=1).astype(np.float64)
        shares: F64 = life[cells] / np.maximum(most, 1.0)[cells // self._n_expert]
        return shares

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells] + self.settings.global_weight * self._life_share(cells)
        return scores

    def _score(self, cell: int) -> float:
        return float(self._scores(np.array([cell]))[0])


class WindowTimesLife(WindowLife):
    """The window's uses times that share (the seed's `hybrid`)."""

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells] * self._life_share(cells)
        return scores


POLICIES: Mapping[str, Callable[[ExpertCache, PolicySettings], Policy]] = {
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
