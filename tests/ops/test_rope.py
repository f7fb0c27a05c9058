"""Rotary embedding in place, whole vectors of pairs and the rest."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from ops.cpu.program import address_of
from ops.cpu.rope import rotate_halves, rotate_neighbours


@njit
def halves(x, n_pairs, cosines, sines):
    rotate_halves(x, n_pairs, cosines, sines)


@njit
def neighbours(x, n_pairs, cosines, sines):
    rotate_neighbours(x, n_pairs, cosines, sines)


@pytest.mark.parametrize("n_pairs", [1, 15, 16, 32, 40])
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_pairs_are_rotated_and_nothing_else(n_pairs: int, pairing: str) -> None:
    rng = np.random.default_rng(n_pairs)
    x = rng.normal(size=2 * n_pairs + 3).astype(np.float32)
    cosines, sines = rng.normal(size=(2, n_pairs)).astype(np.float32)
    wide, expected = x.astype(np.float64), x.astype(np.float64)
    first, second = (
        (slice(0, n_pairs), slice(n_pairs, 2 * n_pairs))
        if pairing == "halves"
        else (slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2))
    )
    expected[first] = wide[first] * cosines - wide[second] * sines
    expected[second] = wide[first] * sines + wide[second] * cosines
    rotate = halves if pairing == "halves" else neighbours
    rotate(address_of(x), n_pairs, address_of(cosines), address_of(sines))
    assert np.allclose(x, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(x[2 * n_pairs :], expected[2 * n_pairs :].astype(np.float32))
