"""TokenUses: two sums and a count of uses for every expert, and who is to come to the GPU by them.

By compiled calls: see `ops.cpu.expert_use`. A cell is the number of an expert over all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_use import TOKEN_USES, add_token, call_of, find_swaps
from ops.cpu.job import live, record
from ops.cpu.program import address_of, aligned
from runtime.experts.cache import Rows

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

CELLS_A_CALL = 6144
"""Of those in slots so many are looked at, on average, for the ones of the lowest scores: 8 us."""
FEW_SWAPS = 32
"""That there is room for, until more are asked for."""


@dataclass(frozen=True)
class Places:
    """Of each cell, looked at in place: i32 slots (-1: none), bool coming, i32 class of its slots,
    from 0;  free  i64: free slots of each class."""

    slots: I32
    coming: NDArray[np.bool_]
    classes: I32
    free: I64


class TokenUses:
    """shape: layers, experts;  growths: what a use is worth more than one a token before."""

    def __init__(
        self, places: Places, shape: tuple[int, int], growths: tuple[float, float]
    ) -> None:
        n_cells, n_classes = len(places.slots), len(places.free)
        self._places, self._n_layers = places, shape[0]
        sums = aligned((n_cells, 4), np.float64)
        self.first: F64 = sums[:, 0]
        self.second: F64 = sums[:, 1]
        self.uses: I64 = sums.view(np.int64)[:, 2]
        """Of each cell, ever."""
        self._cells = aligned(n_cells, np.int64)
        self._best, self._scores = aligned(n_cells, np.int64), aligned(n_cells, np.float64)
        self._choices, self._left = aligned(n_cells, np.int32), aligned(n_classes, np.int64)
        self._token: I32 = np.empty((shape[0], 1, 0), np.int32)
        parts = {"choices": self._choices, "cells": self._cells, "sums": sums}
        parts |= {"slots": places.slots, "coming": places.coming, "classes": places.classes}
        parts |= {"free": places.free, "left": self._left}
        parts |= {"best": self._best, "scores": self._scores}
        self._record = record(
            TOKEN_USES,
            **{name: address_of(part) for name, part in parts.items()},
            n_layers=shape[0],
            n_expert=shape[1],
            n_all=n_cells,
            n_classes=n_classes,
        )
        self.state = live(self._record)
        """The fields of `TOKEN_USES`: worths, weights, margin."""
        self.state.first_worth = self.state.second_worth = 1.0
        self.state.first_growth, self.state.second_growth = growths
        self._search_every = -(-n_cells // CELLS_A_CALL)
        self._searched = self._search_every  # calls since the lowest were looked for
        self._room_for(FEW_SWAPS)
        self._add, self._find = call_of(add_token, self._record), call_of(find_swaps, self._record)

    def _room_for(self, most: int) -> None:
        """Find so many swaps at a time."""
        n_classes = len(self._left)
        # A list that ends before the next search would keep newcomers waiting.
        kept = most if self._search_every == 1 else most * (self._search_every + 1)
        self._most, self._searched = most, self._search_every
        self._swaps = Rows(most)
        self._lowest = aligned((n_classes, kept), np.int64)
        self._low_scores = aligned((n_classes, kept), np.float64)
        state = self.state
        state.swaps, state.lowest = self._swaps.address, address_of(self._lowest)
        state.low_scores, state.most_lowest = address_of(self._low_scores), kept

    def add(self, choices: I32) -> None:
        """A token chose i32[n_layers, 1, n_used], -1: none."""
        if choices.shape != self._token.shape:
            self.state.n_used = choices.shape[2]
            self._token = self._choices[: choices.size].reshape(choices.shape)
        self._token[:] = choices
        self._add()

    @property
    def recent(self) -> I64:
        """The cells that were used since swaps were looked for."""
        return self._cells[: self.state.n_cells]

    def swaps(self, most: int, most_best: int) -> Rows:
        """Cells used since the last call that are worth it, the best first, each with the one that
        leaves for it, or -1 where a slot is free.  Good until the next call.

        most: swaps;  most_best: cells looked at, of the highest scores
        """
        if most > self._most:
            self._room_for(most)
        state = self.state
        self._searched += 1
        search = self._searched >= self._search_every
        state.most, state.most_best, state.search = most, min(most_best, len(self._best)), search
        if self._search_every == 1:
            state.most_lowest = most
        self._find()
        if search and not state.search:
            self._searched = 0
        self._swaps.n = state.n_swaps
        return self._swaps
