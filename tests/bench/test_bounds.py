"""The bounds against exhaustive search and against caches that are played out."""

from __future__ import annotations

from functools import cache as remembered
from itertools import combinations

import numpy as np
import pytest

from bench.routing.bounds import belady_hits, lru_curve, lru_curves, most_used_share
from profiles import RoutingTrace


def trace_of(choices: np.ndarray, n_expert: int) -> RoutingTrace:
    """choices i32[n_tokens, n_layers, n_used]"""
    n_tokens, n_layers, _ = choices.shape
    return RoutingTrace(
        "tiny",
        (n_expert,) * n_layers,
        (1,) * n_layers,
        choices.astype(np.int32),
        np.ones(n_tokens, np.int32),
        np.ones(n_tokens, np.uint8),
        np.zeros(n_tokens, np.int32),
    )


def random_trace(seed: int, n_tokens: int, n_used: int, n_expert: int) -> RoutingTrace:
    """Of two layers."""
    random = np.random.default_rng(seed)
    rows = [
        [random.choice(n_expert, n_used, replace=False) for _ in range(2)] for _ in range(n_tokens)
    ]
    return trace_of(np.array(rows), n_expert)


def best_hits(trace: RoutingTrace, n_slots: int) -> int:
    """The most hits of any choice of what to keep after each token, by trying all."""
    tokens = [
        frozenset((layer, int(e)) for layer, used in enumerate(row) for e in used)
        for row in trace.choices
    ]

    @remembered
    def hits(token: int, kept: frozenset[tuple[int, int]]) -> int:
        if token == len(tokens):
            return 0
        available = sorted(kept | tokens[token])
        n = min(n_slots, len(available))
        later = max(hits(token + 1, frozenset(c)) for c in combinations(available, n))
        return len(kept & tokens[token]) + later

    return hits(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_belady_is_the_best_of_all_choices(seed: int, n_slots: int) -> None:
    trace = random_trace(seed, 8, 1 + seed % 2, 4)
    assert belady_hits(trace, [0, 1], n_slots) == best_hits(trace, n_slots)


def test_belady_counts_after_the_warm_up_and_skips_what_is_unknown() -> None:
    trace = trace_of(np.array([[[0]], [[0]], [[1]], [[0]], [[-1]], [[1]]]), 2)
    assert belady_hits(trace, [0], 2) == 3
    assert belady_hits(trace, [0], 1) == 2
    assert belady_hits(trace, [0], 2, warm_up=2) == 2


def test_the_lru_curve_is_that_of_caches_of_every_size() -> None:
    trace = random_trace(7, 120, 2, 9)
    curves = lru_curves(trace, 20)
    for layer in range(2):
        for n_slots in range(10):
            order: list[int] = []
            hits = 0
            for token, used in enumerate(trace.choices[:, layer].tolist()):
                recent = order[-n_slots:] if n_slots else []
                hits += sum(expert in recent for expert in used) if token >= 20 else 0
                order = [e for e in order if e not in used] + used
            assert curves[layer, n_slots] == pytest.approx(hits / 400)
    assert lru_curve(trace, 20)[9] == pytest.approx(curves[:, 9].sum())


def test_the_most_used() -> None:
    trace = trace_of(np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[0, 3]]]), 4)
    assert most_used_share(trace, 1) == 0.5
    assert most_used_share(trace, 2) == 0.75
    assert most_used_share(trace, 0) == 0.0
