"""Which experts the GPU should hold: decided from what recent tokens used. Pure.

A policy sees every step's choices and proposes swaps; the cache carries them out. Other policies
implement `Policy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.experts.cache import NO_SLOT, Expert, ExpertCache

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

WINDOW_TOKENS = 64
ADMISSION_USES = 2
LISTED_TOKENS = 8
"""Tokens that a list of the least used experts serves at least."""
LISTED_VICTIMS = 64


@dataclass(frozen=True)
class Swap:
    """Bring `expert`; into a free slot, or into that of `victim`."""

    expert: Expert
    victim: Expert | None


class Policy(Protocol):
    """Decides; see `RecencyPolicy` for one."""

    def used(self, choices: I32) -> None:
        """Tokens used these experts: i32[n_layers, n_tokens, n_used]; -1: none."""
        ...

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """Experts to start with, best first, more than there are slots."""
        ...

    def swaps(self, cache: ExpertCache, most: int) -> list[Swap]:
        """Up to `most` swaps that are worth their upload now, best first."""
        ...


class RecencyPolicy:
    """Counts the uses of each expert by the last `window` tokens.

    An expert that is used is admitted from `admission` uses within the window on, if one in a slot
    of its size has fewer; of those that have, one of the least used goes, of equal ones that used
    longest ago.
    """

    def __init__(
        self,
        cache: ExpertCache,
        *,
        window: int = WINDOW_TOKENS,
        admission: int = ADMISSION_USES,
    ) -> None:
        shape = cache.slot_of.shape
        self._n_expert = shape[1]
        self._admission = admission
        self.counts: I64 = np.zeros(shape, np.int64)
        """Uses by the tokens of the window."""
        self._flat_counts = self.counts.reshape(-1)
        self._last_used: I64 = np.zeros(self.counts.size, np.int64)
        self._window: list[I64] = [np.zeros(0, np.int64)] * window
        self._n_tokens = 0
        self._recent: list[I64] = []
        """Cells used since the last look for swaps."""
        self._classes = np.repeat(cache.layer_classes, self._n_expert)
        self._bases = (np.arange(shape[0], dtype=np.int64) * self._n_expert)[:, None, None]
        self._victims: dict[int, deque[int]] = {}
        self._listed_at: dict[int, int] = {}

    def used(self, choices: I32) -> None:
        """See `Policy.used`. Of a long prompt only the last tokens count."""
        recent = choices[:, -len(self._window) :]
        cells = recent + self._bases
        if int(recent.min(initial=0)) < 0:
            cells = np.where(recent >= 0, cells, -1)
        for token in range(cells.shape[1]):
            used = cells[:, token].reshape(-1)
            used = used[used >= 0]
            at = self._n_tokens % len(self._window)
            # A token uses an expert once, so no cell occurs twice in either list.
            self._flat_counts[self._window[at]] -= 1
            self._flat_counts[used] += 1
            self._window[at] = used
            self._n_tokens += 1
            self._last_used[used] = self._n_tokens
            self._recent.append(used)

    def first(self, cache: ExpertCache) -> Iterator[Expert]:
        """Without knowledge: the first experts of every layer in turn."""
        for expert in range(self._n_expert):
            for layer, shape in enumerate(cache.layers):
                if expert < shape.n_expert:
                    yield layer, expert

    def swaps(self, cache: ExpertCache, most: int) -> list[Swap]:
        """See `Policy.swaps`."""
        recent, self._recent = self._recent, []
        if most <= 0 or not recent:
            return []
        cells = recent[0] if len(recent) == 1 else np.unique(np.concatenate(recent))
        absent = (cache.slot_of.reshape(-1)[cells] == NO_SLOT) & ~cache.coming.reshape(-1)[cells]
        wanted = cells[absent & (self._flat_counts[cells] >= self._admission)]
        wanted = wanted[np.argsort(-self._scores(wanted), kind="stable")][: 4 * most]
        n_free = dict.fromkeys(np.unique(self._classes[wanted]).tolist(), 0)
        for size_class in n_free:
            n_free[size_class] = cache.n_free(size_class)
        swaps: list[Swap] = []
        leaving: set[int] = set()  # a list that is made anew has them still
        for cell in wanted.tolist():
            size_class = int(self._classes[cell])
            if n_free[size_class]:
                n_free[size_class] -= 1
                swaps.append(Swap(self._expert(cell), None))
            elif (victim := self._victim(cache, size_class, cell, leaving)) is not None:
                leaving.add(victim)
                swaps.append(Swap(self._expert(cell), self._expert(victim)))
            if len(swaps) == most:
                break
        return swaps

    def _victim(
        self, cache: ExpertCache, size_class: int, cell: int, leaving: set[int]
    ) -> int | None:
        """An expert in a slot of the class, not among `leaving`, that is used less than `cell`.

        Listing the least used takes 50 us, so a list serves several tokens; whoever was used
        meanwhile drops out.
        """
        slots, uses = cache.slot_of.reshape(-1), int(self._flat_counts[cell])
        while True:
            listed = self._victims.get(size_class)
            while listed:
                victim = listed.popleft()
                is_there = slots[victim] != NO_SLOT and victim not in leaving
                if is_there and self._flat_counts[victim] < uses:
                    return victim
            age = self._n_tokens - self._listed_at.get(size_class, -LISTED_TOKENS)
            if age < LISTED_TOKENS:
                return None
            self._victims[size_class] = self._least_used(cache, size_class)
            self._listed_at[size_class] = self._n_tokens

    def _least_used(self, cache: ExpertCache, size_class: int) -> deque[int]:
        """Cells in slots of the class, the least used first."""
        cells = np.flatnonzero(cache.resident.reshape(-1) & (self._classes == size_class))
        scores = self._scores(cells)
        if len(cells) > LISTED_VICTIMS:
            nearest = np.argpartition(scores, LISTED_VICTIMS)[:LISTED_VICTIMS]
            cells, scores = cells[nearest], scores[nearest]
        return deque(cells[np.argsort(scores, kind="stable")].tolist())

    def _scores(self, cells: I64) -> I64:
        """Uses first, then how recent the last one was."""
        scores: I64 = (self._flat_counts[cells] << 40) + self._last_used[cells]
        return scores

    def _expert(self, cell: int) -> Expert:
        return cell // self._n_expert, cell % self._n_expert
