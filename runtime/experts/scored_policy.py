"""ScoredPolicy: what policies share that keep in the slots the experts of the highest scores.

All see the same tokens, may bring an expert only right after it was missed, and never stop a step:
a miss is computed elsewhere meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles import RecentUse
from runtime.experts.cache import NO_ROWS, NO_SLOT, NO_VICTIM, Expert, ExpertCache, Rows

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

CELLS_A_TOKEN = 512
"""Cells that the search for victims may look at a token, on average: 10 us."""
VICTIMS_A_TOKEN = 16
"""Swaps that its list suffices for."""
COUNTED_TOKENS = 128
"""Of a long prompt only the last tokens count."""
UNCOUNTED_TOKENS = 32
NO_CELLS: I64 = np.zeros(0, np.int64)


@dataclass(frozen=True)
class PolicySettings:
    """What a policy may be told; the seed's names in brackets.

    window         tokens that count as recent (window, recent)
    admission      recent uses from which on a missed expert may get a slot; 0 and 1: any (admit);
                   `fitted` needs none
    margin         score by which a newcomer must beat its victim, in the policy's own unit (margin,
                   swap-lead); None: what suits it
    sticky         share of the slots whose experts stay: the most used ever (sticky, stay-bonus)
    global_weight  weight of lifetime use against recent use (global-weight)
    half_life      tokens after which a use counts half
    """

    window: int = 64
    admission: int = 2
    margin: float | None = None
    sticky: float = 0.0
    global_weight: float = 16.0
    half_life: float = 64.0


class ScoredPolicy:
    """Brings the missed experts of the highest scores, for the residents of the lowest.

    A subclass keeps `scores`, or computes it: see `_count` and `_scores`. Cells are numbers of
    experts over all layers: layer * n_expert + expert.
    """

    DEFAULT_MARGIN = 0.0

    def __init__(self, cache: ExpertCache, settings: PolicySettings) -> None:
        self.shape: tuple[int, int] = cache.slot_of.shape
        """Layers, experts."""
        n_layers, self._n_expert = self.shape
        self.settings = settings
        self.margin = self.DEFAULT_MARGIN if settings.margin is None else settings.margin
        self.n_cells = n_layers * self._n_expert
        self.n_tokens = 0
        self.scores: F64 = np.zeros(self.n_cells)
        self._life: I64 = np.zeros(self.n_cells, np.int64)
        self._uncounted: list[I64] = []
        self._slots = cache.slot_of.reshape(-1)
        self._coming = cache.coming.reshape(-1)
        self._class_of: list[int] = cache.class_of.tolist()
        self._cells_of = {c: np.flatnonzero(cache.class_of == c) for c in set(self._class_of)}
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

    def know(self, uses: U64, n_tokens: int, recent: RecentUse | None = None) -> None:
        """Begin with the uses by n_tokens earlier tokens, u64[n_layers, n_expert], and with what
        the last of them used, where that is known."""
        self._life += uses.reshape(-1).astype(np.int64)

    def recent(self) -> RecentUse | None:
        """What to `know` the next time; None: this policy has no use for it."""
        return None

    def used(self, choices: I32) -> None:
        """See `Policy.used`."""
        choices = choices[:, -COUNTED_TOKENS:]
        whole = not choices.size or choices.min() >= 0
        for token in range(choices.shape[1]):
            chosen = choices[:, token]
            cells = (chosen + self._bases).reshape(-1)
            if not whole:
                cells = cells[chosen.reshape(-1) >= 0]
            self.n_tokens += 1
            self._count(cells)
            self._recent.append(cells)
            self._uncounted.append(cells)
            self._after_token()
        if len(self._uncounted) >= UNCOUNTED_TOKENS:
            _ = self.life

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """Those of the highest worth; of those worth the same, the first of every layer in turn."""
        n_expert = [layer.n_expert for layer in cache.layers]
        for cell in self._best_first().tolist():
            layer, expert = divmod(cell, self._n_expert)
            if expert < n_expert[layer]:
                yield layer, expert

    def swaps(self, cache: ExpertCache, most: int) -> Rows:
        """See `Policy.swaps`."""
        cells = self._take_recent()
        if most <= 0 or not len(cells):
            return NO_ROWS
        wanted, scores = self._best_missed(cells, most + cache.n_pending)
        return Rows.of(self._paired(cache, wanted, scores, most))

    def _take_recent(self) -> I64:
        """The cells that were used since the last call, each once."""
        recent, self._recent = self._recent, []
        return recent[0] if len(recent) == 1 else np.unique(np.concatenate([NO_CELLS, *recent]))

    def _best_missed(self, cells: I64, most: int) -> tuple[list[int], list[float]]:
        """Those of the cells in no slot that may get one, up to `most`, the best first, and their
        scores."""
        wanted, scores = self._wanted(cells[self._slots[cells] == NO_SLOT])
        order = scores.argsort()[: -most - 1 : -1]  # of so few, sorting all is the quickest
        return wanted[order].tolist(), scores[order].tolist()

    def _paired(
        self, cache: ExpertCache, wanted: list[int], scores: list[float], most: int
    ) -> list[tuple[int, int]]:
        """Swaps for the wanted cells, best first, as far as they are worth it."""
        swaps: list[tuple[int, int]] = []
        n_free: dict[int, int] = {}
        full: set[int] = set()
        self._going.clear()
        for cell, score in zip(wanted, scores, strict=True):
            size_class = self._class_of[cell]
            if size_class in full or self._coming.item(cell):
                continue
            if size_class not in n_free:
                n_free[size_class] = cache.n_free.item(size_class)
            if n_free[size_class]:
                n_free[size_class] -= 1
                swaps.append((cell, NO_VICTIM))
            else:
                victim = self._victim(size_class, score - self.margin)
                if victim is None:
                    full.add(size_class)
                    continue
                self._going.add(victim)
                swaps.append((cell, victim))
            if len(swaps) == most:
                break
        return swaps

    def _best_first(self) -> I64:
        """All cells, the most used ever first."""
        return np.lexsort((self._expert_numbers(), -self.life))

    def _count(self, cells: I64) -> None:
        """A token used these cells, each once."""
        raise NotImplementedError

    def _after_token(self) -> None:
        """It was counted."""

    def _scores(self, cells: I64) -> F64:
        scores: F64 = self.scores[cells]
        return scores

    def _score(self, cell: int) -> float:
        return float(self.scores[cell])

    def _wanted(self, missed: I64) -> tuple[I64, F64]:
        """Those of the cells, just missed, that may get a slot, and their scores."""
        wanted = missed[self._admitted(missed)]
        return wanted, self._scores(wanted)

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
                gone = self._slots.item(victim) == NO_SLOT or victim in self._going
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
        cells = self._residents(size_class)
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

    def _residents(self, size_class: int) -> I64:
        """The cells in slots of the class."""
        cells = self._cells_of[size_class]
        residents: I64 = cells[self._slots[cells] != NO_SLOT]
        return residents

    def _without_sticky(self, cells: I64) -> I64:
        """Without the share of them that was used most."""
        n_sticky = int(self.settings.sticky * len(cells))
        order = np.argsort(-self.life[cells], kind="stable")
        others: I64 = cells[np.sort(order[n_sticky:])]
        return others

    def _expert_numbers(self) -> I64:
        numbers: I64 = np.arange(self.n_cells, dtype=np.int64) % self._n_expert
        return numbers
