"""The compiled quantizer of activations against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from ops.arithmetic import activation_layout, quantize_rows
from ops.cpu.activation import quantize_row
from ops.quants.block import ACTIVATION_GROUP, F32, ActivationKind
from tests.support.guarded import GuardedBuffer

CASES: list[tuple[ActivationKind, int]] = [
    ("q8_256", 256),
    ("q8_256", 1280),
    ("q8_256", 2048),
    ("q8_32", 32),
    ("q8_32", 96),
    ("q8_32", 1408),
]


@njit("void(int64, int64, int64, int64)", cache=True)
def quantize(group: int, x: int, n: int, record: int) -> None:
    quantize_row(group, x, n, record)


@pytest.mark.parametrize(("kind", "n"), CASES)
def test_records_are_those_of_the_contract(kind: ActivationKind, n: int) -> None:
    rows = difficult_rows(n)
    with np.errstate(invalid="ignore"):
        expected = quantize_rows(kind, rows)
    for row, record in zip(rows, expected, strict=True):
        source = GuardedBuffer(row.view(np.uint8))
        target = GuardedBuffer(np.full(activation_layout(kind, n)[2], 0xAA, np.uint8))
        quantize(ACTIVATION_GROUP[kind], source.address, n, target.address)
        np.testing.assert_array_equal(target.bytes, record)


def difficult_rows(n: int) -> F32:
    """Plain rows of several magnitudes, then ties, zeros, extremes, NaN and infinities."""
    rng = np.random.default_rng(n)
    plain = rng.normal(size=(8, n)) * 10.0 ** rng.integers(-32, 30, (8, 1))
    ramp = np.arange(n) % 254 - 127
    ties = ramp + 0.5
    ties[::16] = 127
    special = [ramp, ties, np.zeros(n), np.full(n, -0.0), np.full(n, -3.4e38), np.full(n, 1e-45)]
    poisoned = rng.normal(size=(3, n))
    poisoned[[0, 1, 2], [5, n // 2, n - 1]] = np.nan, np.inf, -np.inf
    return np.concatenate([plain, special, poisoned]).astype(np.float32)
