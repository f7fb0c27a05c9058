"""exp, silu and the vector loops have the bits of the contract."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from ops import arithmetic
from ops.cpu.elementwise import exp, exp_minus, sigmoid, silu_mul
from ops.cpu.program import address_of
from ops.cpu.rows import is_finite_row
from ops.cpu.vector import dot, max16, sum16


@njit
def exp_of(x):
    return exp(x)


@njit
def exp_rows(x, n, peak):
    exp_minus(x, n, peak)


@njit
def sigmoid_of(x):
    return sigmoid(x)


@njit
def silu_rows(gate, up, out, n):
    silu_mul(gate, up, out, n)


@njit
def finite(x, n):
    return is_finite_row(x, n)


@njit
def folds(x, y, n):
    return dot(x, y, n), sum16(x, n // 16 * 16), max16(x, n // 16 * 16)


SPECIAL = np.array([0, -0.0, np.nan, np.inf, -np.inf, 88.8, -87.4, -103.9, -104.1], np.float32)


def test_exp_is_the_contract_scalar_and_vector() -> None:
    x = np.concatenate([np.linspace(-110, 95, 4096 - len(SPECIAL), dtype=np.float32), SPECIAL])
    expected = arithmetic.exp(x)
    rows = x.copy()
    exp_rows(address_of(rows), len(rows), np.float32(0))
    assert np.array_equal(rows.view(np.int32), expected.view(np.int32))
    for i in range(0, len(x), 37):
        assert np.array_equal(exp_of(x[i]), expected[i], equal_nan=True)


@pytest.mark.parametrize("n", [1, 15, 16, 40, 768])
def test_silu_is_the_contract(n: int) -> None:
    rng = np.random.default_rng(n)
    gate, up = (rng.normal(size=(2, n)) * 8).astype(np.float32)
    out = np.empty_like(gate)
    silu_rows(address_of(gate), address_of(up), address_of(out), n)
    assert np.array_equal(out, arithmetic.silu_mul(gate, up))


def test_sigmoid() -> None:
    x = np.linspace(-20, 20, 41, dtype=np.float32)
    assert np.allclose(
        [sigmoid_of(v) for v in x], 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6
    )


@pytest.mark.parametrize("n", [16, 17, 63, 64, 200, 2049])
def test_folds(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(2, n)).astype(np.float32)
    product, total, largest = folds(address_of(x), address_of(y), n)
    part = x[: n // 16 * 16]
    assert abs(product - x.astype(np.float64) @ y) < 1e-5 * np.sqrt(n)
    assert abs(total - part.astype(np.float64).sum()) < 1e-5 * np.sqrt(n)
    assert largest == part.max()


@pytest.mark.parametrize("n", [1, 16, 33])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_seen(n: int, value: float) -> None:
    x = np.full(n, 3e38, np.float32)
    assert finite(address_of(x), n)
    for i in range(n):
        x[i] = value
        assert not finite(address_of(x), n)
        x[i] = 0
