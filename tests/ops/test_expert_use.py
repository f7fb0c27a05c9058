"""The compiled calls of the cache's policy: what NumPy makes of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ops.gpu.router import in_place
from runtime.experts import token_uses
from runtime.experts.served import InPlaceRule, UseCounter, counted
from runtime.experts.token_uses import Places, TokenUses
from runtime.experts.totals import IN_PLACE, N_KINDS, NOBODY, ON_CPU

N_LAYERS, N_EXPERT, N_USED = 5, 24, 4
N_CELLS = N_LAYERS * N_EXPERT
BASES = np.arange(N_LAYERS)[:, None] * N_EXPERT


def some_choices(random: np.random.Generator, n_tokens: int) -> np.ndarray:
    """i32[n_layers, n_tokens, n_used]; some are -1."""
    rows = [random.permutation(N_EXPERT)[:N_USED] for _ in range(N_LAYERS * n_tokens)]
    choices = np.array(rows, np.int32).reshape(N_LAYERS, n_tokens, N_USED)
    choices[random.random(choices.shape) < 0.1] = -1
    return choices


@pytest.mark.parametrize("n_tokens", [0, 1, 3, 6, 7, 40])
@pytest.mark.parametrize("every", [0, 2])
def test_choices_are_counted(n_tokens: int, every: int) -> None:
    random = np.random.default_rng(n_tokens)
    kinds = random.integers(0, NOBODY, (N_LAYERS, N_EXPERT)).astype(np.int8)
    rule = InPlaceRule(every, np.ones(N_LAYERS, np.bool_), 8)
    totals = np.zeros((N_LAYERS, N_KINDS), np.int64)
    counter, all_counts = UseCounter(kinds, totals), totals.copy()
    for _ in range(3):
        kinds[random.random(kinds.shape) < 0.3] = ON_CPU  # it looks anew every time
        wide = some_choices(random, n_tokens + 2)
        choices = wide[:, :n_tokens]  # as steps give them: rows with gaps between
        found = counter.counted(choices, rule)
        expected = np.zeros((n_tokens, N_LAYERS, N_KINDS), np.int64)
        for layer in range(N_LAYERS):
            for token in range(n_tokens):
                row = choices[layer, token]
                own = np.where(row < 0, NOBODY, kinds[layer, row])
                if every and n_tokens <= rule.n_tokens:
                    own[in_place(own == ON_CPU, every)] = IN_PLACE
                np.add.at(expected[token, layer], own, 1)
        if len(found) == n_tokens:
            assert np.array_equal(found, expected)
            assert np.array_equal(found, counted(kinds, choices, rule))
        else:
            assert choices.size > kinds.size and len(found) == 1
            whole = [kind for kind in range(N_KINDS) if kind != NOBODY]
            assert np.array_equal(found[0][:, whole], expected.sum(axis=0)[:, whole])
        all_counts += found.sum(axis=0)
        assert np.array_equal(totals, all_counts)
        kept = found.copy()
        all_counts += counter.counted(some_choices(random, 1), rule)[0]
        assert np.array_equal(found, kept), "a result is its owner's"


class Cells:
    """Random sums and places of all cells, in two classes of slots."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.slots = np.where(random.random(N_CELLS) < 0.5, -1, 7).astype(np.int32)
        self.coming = (random.random(N_CELLS) < 0.1) & (self.slots < 0)
        self.classes = np.repeat([0, 1, 0, 0, 1], N_EXPERT).astype(np.int32)
        self.free = np.zeros(2, np.int64)
        places = Places(self.slots, self.coming, self.classes, self.free)
        self.uses = TokenUses(places, (N_LAYERS, N_EXPERT), (1.5, 1.25))
        self.first, self.second = self.uses.first, self.uses.second
        self.n_uses = self.uses.uses
        self.first[:], self.second[:] = random.random(N_CELLS), random.random(N_CELLS)
        self.n_uses[:] = random.integers(0, 9, N_CELLS)

    def swaps(
        self,
        used: np.ndarray,
        free: list[int],
        most: int,
        n_best: int,
        weights: tuple[float, float],
        margin: float,
    ) -> list[list[int]]:
        """Those of tokens that have used these cells, each once."""
        state = self.uses.state
        self.uses._cells[: len(used)] = used
        self.free[:] = free
        state.n_cells, state.margin = len(used), margin
        state.first_weight, state.second_weight = weights
        found: list[list[int]] = self.uses.swaps(most, n_best).values.tolist()
        assert self.free.tolist() == free and not len(self.uses.recent)
        return found


def test_a_tokens_uses_are_added() -> None:
    cells = Cells(1)
    for token in range(20):
        before = cells.first.copy(), cells.second.copy(), cells.n_uses.copy()
        choices = some_choices(cells.random, 1)
        cells.uses.add(choices)
        choices = choices[:, 0]
        found = cells.uses.recent.copy()
        assert np.array_equal(found, (choices + BASES)[choices >= 0])
        cells.uses.swaps(0, 0)
        worths = cells.uses.state.first_worth, cells.uses.state.second_worth, 1
        assert worths == (1.5 ** (token + 1), 1.25 ** (token + 1), 1)
        was_used = np.zeros(N_CELLS, np.int64)
        was_used[found] = 1
        sums = cells.first, cells.second, cells.n_uses
        for now, then, worth in zip(sums, before, worths, strict=True):
            assert np.array_equal(now, then + worth * was_used)


def test_what_is_no_experts_number_counts_as_none() -> None:
    cells = Cells(1)
    before = cells.first.copy(), cells.second.copy(), cells.n_uses.copy()
    choices = np.full((N_LAYERS, N_USED), N_EXPERT, np.int32)
    choices[:, 1], choices[:, 2] = 1 << 30, -(1 << 31)
    choices[1, 3] = N_EXPERT - 1
    cells.uses.add(choices[:, None])
    assert cells.uses.recent.tolist() == [2 * N_EXPERT - 1]
    for now, then in zip((cells.first, cells.second, cells.n_uses), before, strict=True):
        assert np.flatnonzero(now != then).tolist() == [2 * N_EXPERT - 1]
    rule = InPlaceRule(0, np.ones(N_LAYERS, np.bool_), 8)
    counts = UseCounter(
        np.zeros((N_LAYERS, N_EXPERT), np.int8), np.zeros((N_LAYERS, N_KINDS), np.int64)
    ).counted(choices[:, None], rule)
    assert counts.sum() == counts[..., [ON_CPU, NOBODY]].sum() == choices.size
    assert counts[..., ON_CPU].sum() == 1


def test_a_cell_that_several_tokens_use_is_looked_at_once() -> None:
    cells = Cells(1)
    for expert in (3, 5, 3):
        cells.uses.add(np.full((N_LAYERS, 1, 1), expert, np.int32))
    assert sorted(cells.uses.recent.tolist()) == sorted(
        np.add(BASES, [[3, 5]]).reshape(-1).tolist()
    )
    cells.uses.swaps(0, 0)
    cells.uses.add(np.full((N_LAYERS, 1, 1), 3, np.int32))
    assert cells.uses.recent.tolist() == (BASES[:, 0] + 3).tolist()


def expected_swaps(
    cells: Cells, wanted: np.ndarray, free: list[int], most: int, n_best: int, margin: float
) -> list[list[int]]:
    """One after the other, by sorting."""
    scores = cells.first * 0.3 + cells.second * 0.6
    missed = wanted[(cells.slots[wanted] < 0) & ~cells.coming[wanted]]
    best = missed[np.argsort(-scores[missed])][:n_best].tolist()
    residents = np.flatnonzero(cells.slots >= 0)
    by_score = residents[np.argsort(scores[residents])]
    leaving = [by_score[cells.classes[by_score] == kind].tolist() for kind in (0, 1)]
    left, swaps = list(free), list[list[int]]()
    for cell in best:
        kind = cells.classes[cell]
        if left[kind]:
            left[kind] -= 1
            swaps.append([cell, -1])
        elif leaving[kind] and scores[leaving[kind][0]] < scores[cell] - margin:
            swaps.append([cell, leaving[kind].pop(0)])
    return swaps[:most]


@pytest.mark.parametrize("free", [[0, 0], [2, 0], [0, 40], [1, 3]])
@pytest.mark.parametrize(("most", "n_best"), [(1, 4), (6, 10), (16, 200)])
def test_who_comes_and_who_leaves(free: list[int], most: int, n_best: int) -> None:
    n_swaps = 0
    for seed in range(8):
        cells = Cells(seed)
        for margin in (0.0, 0.3, 0.8):
            wanted = np.flatnonzero(cells.random.random(N_CELLS) < 0.4)
            found = cells.swaps(wanted, free, most, n_best, (0.3, 0.6), margin)
            assert found == expected_swaps(cells, wanted, free, most, n_best, margin)
            n_swaps += len(found)
    assert n_swaps > 0


def test_of_equals_the_last_comes_and_the_first_leaves() -> None:
    cells = Cells(0)
    cells.first[:], cells.second[:], cells.slots[:], cells.coming[:] = 0.0, 0.0, 5, False
    cells.first[:4], cells.slots[:4] = 1.0, -1
    swaps = cells.swaps(np.arange(4), [0, 0], 3, 9, (1.0, 1.0), 0.5)
    assert swaps == [[3, 4], [2, 5], [1, 6]]
    assert cells.swaps(np.arange(4), [0, 0], 3, 9, (1.0, 1.0), 1.0) == []
    assert cells.swaps(np.arange(4, 9), [9, 9], 3, 9, (1.0, 1.0), 0.0) == []
    assert cells.swaps(np.arange(0), [9, 9], 3, 9, (1.0, 1.0), 0.0) == []


def test_of_many_the_lowest_are_kept_for_some_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_uses, "CELLS_A_CALL", N_CELLS // 3)
    cells = Cells(0)
    cells.first[:], cells.second[:], cells.slots[:], cells.coming[:] = 0.0, 0.0, 5, False
    cells.first[:4], cells.slots[:4] = 9.0, -1
    cells.classes[:] = 0
    cells.first[4:] = np.arange(4, N_CELLS) / N_CELLS  # the lowest are 4, 5, 6, ...

    def victims(most: int) -> list[int]:
        found = cells.swaps(np.arange(4), [0, 0], most, 9, (1.0, 0.0), 0.5)
        return [victim for _, victim in found]

    assert victims(2) == [4, 5]
    cells.slots[6], cells.first[7], cells.first[60] = -1, 9.0, -1.0
    assert victims(2) == [8, 9], "one has left, one was used since; those taken are not named again"
    assert victims(1) == [10]
    cells.first[7] = 0.0
    assert victims(4) == [60, 7, 4, 5], "looked for anew"
