"""TokenUses: two sums and a count of uses for every expert, and who is to come to the GPU by them.

By compiled calls: see `ops.cpu.expert_use`. A cell is the number of an expert over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.cpu.expert_use import ADD_TOKEN, FIND_SWAPS, add_token, call_of, find_swaps
from ops.cpu.job import record
from ops.cpu.program import address_of, aligned

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

CELLS_A_CALL = 6144
"""Of those in slots so many are looked at, on average, for the ones of the lowest scores: 8 us."""


@dataclass(frozen=True)
class Sums:
    """Of each cell, changed in place: f64 first, second, i64 uses."""

    first: F64
    second: F64
    uses: I64


@dataclass(frozen=True)
class Places:
    """Of each cell, looked at in place: i32 slots (-1: none), bool coming, i32 class of its slots,
    from 0."""

    slots: I32
    coming: NDArray[np.bool_]
    classes: I32


class TokenUses:
    """Of tokens that use n_used experts in each layer at most.

    shape  layers, experts;  most: swaps at a time
    """

    def __init__(
        self, sums: Sums, places: Places, shape: tuple[int, int], n_used: int, most: int
    ) -> None:
        (n_layers, n_expert), n_cells = shape, len(places.slots)
        self.n_used, self.most = n_used, most
        self._kept = sums, places  # whose addresses the calls have
        choices = aligned(max(n_layers * n_used, 1), np.int32)
        self._choices = choices[: n_layers * n_used].reshape(n_layers, n_used)
        self._cells = aligned(max(n_cells, len(choices)), np.int64)
        n_classes = int(places.classes.max(initial=0)) + 1
        self._free, self._swaps = aligned(n_classes, np.int64), aligned((most, 2), np.int64)
        self._best, self._scores = aligned(n_cells, np.int64), aligned(n_cells, np.float64)
        self._search_every = -(-n_cells // CELLS_A_CALL)
        self._searched = self._search_every  # calls since the lowest were looked for
        # A list that ends before the next search would keep newcomers waiting. 0: as many as swaps.
        kept = most * (self._search_every + 1)
        self._n_lowest = 0 if self._search_every == 1 else kept
        self._lowest = aligned((n_classes, kept), np.int64)
        self._low_scores = aligned((n_classes, kept), np.float64)
        parts = {"choices": choices, "cells": self._cells, "uses": sums.uses}
        parts |= {"first": sums.first, "second": sums.second, "free": self._free}
        parts |= {"slots": places.slots, "coming": places.coming, "classes": places.classes}
        parts |= {"best": self._best, "scores": self._scores, "swaps": self._swaps}
        parts |= {"lowest": self._lowest, "low_scores": self._low_scores}
        fields = {name: address_of(part) for name, part in parts.items()}
        fields |= {"n_layers": n_layers, "n_used": n_used, "n_expert": n_expert}
        fields |= {"n_all": n_cells, "n_classes": n_classes}
        self._token, self._wanted = (
            record(kind, **{name: fields[name] for name in fields if name in (kind.names or ())})
            for kind in (ADD_TOKEN, FIND_SWAPS)
        )
        # The fields from n_swaps on, which change: together they take a fifth of the time.
        self._numbers = self._wanted.view(np.int64)[-9:-3]
        self._factors = self._wanted.view(np.float64)[-3:]
        self._add, self._find = call_of(add_token, self._token), call_of(find_swaps, self._wanted)

    def add(self, choices: I32, first_worth: float, second_worth: float) -> I64:
        """A token chose i32[n_layers, n_used], -1: none.  The cells of its experts, in order."""
        self._choices[:] = choices
        token = self._token
        token["first_worth"], token["second_worth"] = first_worth, second_worth
        self._add()
        return self._cells[: token["n_cells"].item()].copy()

    def swaps(
        self,
        cells: I64,
        free: Sequence[int],
        most: int,
        most_best: int,
        factors: tuple[float, float],
        margin: float,
    ) -> list[list[int]]:
        """Those of the cells that are worth it, each with the one that leaves for it, or -1 where
        a slot is free.

        cells      each once;  free: slots of each class
        most       swaps, `self.most` at most; of the most_best cells of the highest scores
        factors    of both sums in a score;  margin  by which a newcomer's has to be higher
        """
        n_cells, numbers = len(cells), self._numbers
        self._cells[:n_cells] = cells
        self._free[:] = free
        self._searched += 1
        search = self._searched >= self._search_every
        best, lowest = min(most_best, len(self._best)), self._n_lowest or most
        numbers[1:] = n_cells, most, best, lowest, search
        self._factors[:] = *factors, margin
        self._find()
        n_swaps, _, _, _, _, left = numbers.tolist()
        if search and not left:
            self._searched = 0
        swaps: list[list[int]] = self._swaps[:n_swaps].tolist()
        return swaps
