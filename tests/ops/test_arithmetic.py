"""The arithmetic contract against exact fractions, and its corners."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.arithmetic import (
    activation_layout,
    combine,
    dot_rows,
    exp,
    fma,
    n_partials,
    quantize_rows,
    silu_mul,
)
from ops.quants import FORMATS
from ops.quants.block import ACTIVATION_GROUP, F32, ActivationKind
from tests.support.blocks import BLOCK_FORMATS, FLOAT_FORMATS, random_rows

HALF_WAY = [(673, 24929, 2**24, 2**24 + 2), (1549, 10831, 2**24 + 2, 2**24 + 4)]
"""Factors of 2^24 + 1 and 2^24 + 3, and the f32 on both sides of their product."""

INTEGER_KINDS: tuple[ActivationKind, ...] = ("q8_256", "q8_32")


def random_f32(shape: tuple[int, ...], seed: int) -> F32:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(value: Fraction) -> np.float32:
    """The f32 nearest to a fraction, halves to even: compare the exact neighbours of a guess."""
    guess = np.float32(float(value))
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]

    def distance(candidate: np.float32) -> tuple[Fraction, int]:
        bits = int(np.array(candidate).view(np.uint32))
        return abs(Fraction(float(candidate)) - value), bits & 1

    return min((c for c in around if np.isfinite(c)), key=distance)


def parts(kind: ActivationKind, record: NDArray[np.uint8], n: int) -> tuple[NDArray, F32, NDArray]:
    scales_at, sums_at, _ = activation_layout(kind, n)
    n_scales = n // ACTIVATION_GROUP[kind]
    return (
        record[:n].view(np.int8),
        record[scales_at : scales_at + 4 * n_scales].view(np.float32),
        record[sums_at : sums_at + n // 8].view(np.int16),
    )


# -- fma ---------------------------------------------------------------------------------------


def test_fma_rounds_once_for_random_operands() -> None:
    a, b, c = random_f32((3, 2000), seed=1)
    c = c * np.exp2(np.random.default_rng(2).integers(-40, 40, 2000)).astype(np.float32)

    got = fma(a, b, c)

    for x, y, z, r in zip(a, b, c, got, strict=True):
        assert r == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("a", "b", "below", "above"), HALF_WAY)
def test_fma_does_not_round_twice(a: int, b: int, below: int, above: int, sign: int) -> None:
    """a * b lies half way between two f32; c decides, and f64 is too short to hold it."""

    def nudged(c: float) -> float:
        return float(fma(np.float32(sign * a), np.float32(b), np.float32(sign * c)))

    assert nudged(2.0**-80) == sign * above
    assert nudged(-(2.0**-80)) == sign * below
    assert nudged(0.0) == sign * (above if above % 4 == 0 else below)


def test_fma_subnormal_results_round_once() -> None:
    rng = np.random.default_rng(3)
    a = random_f32((500,), seed=4) * np.float32(2.0**-70)
    b = random_f32((500,), seed=5) * np.float32(2.0**-72)
    c = (rng.integers(-50, 50, 500) * 2.0**-149).astype(np.float32)

    got = fma(a, b, c)

    for x, y, z, r in zip(a, b, c, got, strict=True):
        assert r == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def test_fma_at_infinity() -> None:
    big = np.float32(3e38)
    inf = np.float32(np.inf)
    assert fma(big, np.float32(2), np.float32(0)) == inf
    assert fma(big, np.float32(2), -big) == big
    assert np.isnan(fma(inf, np.float32(0), np.float32(1)))
    assert np.isnan(fma(inf, np.float32(1), -inf))


# -- activations -------------------------------------------------------------------------------


def test_layout_is_cache_lines() -> None:
    assert activation_layout("q8_256", 512) == (512, 576, 640)
    assert activation_layout("q8_32", 96) == (128, 192, 256)
    assert activation_layout("f32", 20) == (128, 128, 128)
    with pytest.raises(ValueError, match="300 activations is not a whole number of 256"):
        activation_layout("q8_256", 300)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_quantize_follows_the_formula_value_by_value(kind: ActivationKind) -> None:
    n, group = 512, ACTIVATION_GROUP[kind]
    rows = random_f32((3, n), seed=6)

    records = quantize_rows(kind, rows)

    for row, record in zip(rows, records, strict=True):
        q, scales, sums = parts(kind, record, n)
        for g in range(n // group):
            x = row[g * group : (g + 1) * group]
            amax = np.abs(x).max()
            inverse = np.float32(127) / amax
            expected = [min(127, max(-127, round(float(v * inverse)))) for v in x]
            assert q[g * group : (g + 1) * group].tolist() == expected
            assert scales[g] == amax / np.float32(127)
        assert sums.tolist() == q.reshape(-1, 16).sum(1, dtype=np.int16).tolist()


def test_quantize_rounds_halves_to_even() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    q, scales, sums = parts("q8_32", quantize_rows("q8_32", row)[0], 32)
    assert q[:6].tolist() == [127, 0, 2, 2, 0, -2]
    assert scales.tolist() == [1.0] and sums.tolist() == [129, 0]


@pytest.mark.parametrize("amax", [0.0, -0.0, 1e-38, 9.9e-31])
def test_a_tiny_group_is_zero(amax: float) -> None:
    record = quantize_rows("q8_32", np.full((1, 32), amax, np.float32))
    assert not record.any()


@pytest.mark.parametrize("amax", [1e-30, 3.4e38])
def test_extreme_groups_use_the_whole_range(amax: float) -> None:
    row = np.full((1, 32), -amax, np.float32)
    q, scales, _ = parts("q8_32", quantize_rows("q8_32", row)[0], 32)
    assert (q == -127).all() and np.isfinite(scales).all() and (scales > 0).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q4_1", "NVFP4", "F32"])
def test_a_value_that_is_not_finite_poisons_its_token_only(name: str, bad: float) -> None:
    fmt = FORMATS[name]
    x = random_f32((2, 512), seed=7)
    x[1, 300] = bad
    records = quantize_rows(fmt.activation, x)

    y = dot_rows(fmt, random_rows(fmt, 8, 512, seed=8), records)

    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).any()


# -- dot products ------------------------------------------------------------------------------


def exact_dot(
    name: str, weights: NDArray[np.uint8], record: NDArray[np.uint8], n: int
) -> np.float32:
    """The contract's dot product of one row with Python integers and fractions."""
    fmt = FORMATS[name]
    q, scales, sums = parts(fmt.activation, record, n)
    u = fmt.units(weights.reshape(-1, fmt.block_bytes))
    size, group = fmt.unit_elems, ACTIVATION_GROUP[fmt.activation]
    partials = [np.float32(0)] * n_partials(fmt)
    flat_weights, flat_scale = u.weights.reshape(-1, size), u.scale.reshape(-1)

    def add(index: int, scale: np.float32, total: int) -> None:
        p = partials[index % len(partials)]
        exact = Fraction(float(scale)) * Fraction(float(np.float32(total))) + Fraction(float(p))
        partials[index % len(partials)] = rounded(exact)

    for i in range(n // size):
        at, scale_x = i * size, scales[i * size // group]
        total = sum(
            int(w) * int(v) for w, v in zip(flat_weights[i], q[at : at + size], strict=True)
        )
        add(i, flat_scale[i] * scale_x, total)
        if u.mins is not None and u.min_scale is not None:
            mins = u.mins.reshape(n // size, -1)[i]
            unit_sums = sums[at // 16 : (at + size) // 16]
            total = sum(int(m) * int(s) for m, s in zip(mins, unit_sums, strict=True))
            add(i, u.min_scale.reshape(-1)[i] * scale_x, total)
    while len(partials) > 1:
        half = len(partials) // 2
        partials = [partials[k] + partials[k + half] for k in range(half)]
    return partials[0]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_dot_is_the_contract_in_exact_numbers(name: str) -> None:
    fmt, n = FORMATS[name], 2816 if FORMATS[name].activation == "q8_256" else 640
    weights = random_rows(fmt, 2, n, seed=9)
    records = quantize_rows(fmt.activation, random_f32((2, n), seed=10))

    y = dot_rows(fmt, weights, records)

    for t, r in np.ndindex(2, 2):
        assert y[t, r] == exact_dot(name, weights[r], records[t], n)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_dot_is_sixty_four_fma_chains(name: str) -> None:
    fmt, n = FORMATS[name], 200
    weights, x = random_rows(fmt, 2, n, seed=11), random_f32((1, n), seed=12)

    y = dot_rows(fmt, weights, quantize_rows("f32", x))

    values = fmt.dequantize_rows(weights)
    for r in range(2):
        chains = [np.float32(0)] * 64
        for i, (w, v) in enumerate(zip(values[r], x[0], strict=True)):
            exact = Fraction(float(w)) * Fraction(float(v)) + Fraction(float(chains[i % 64]))
            chains[i % 64] = rounded(exact)
        while len(chains) > 1:
            half = len(chains) // 2
            chains = [chains[k] + chains[k + half] for k in range(half)]
        assert y[0, r] == chains[0]


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    fmt = FORMATS[name]
    weights = random_rows(fmt, 5, 512, seed=13)
    records = quantize_rows(fmt.activation, random_f32((4, 512), seed=14))

    together = dot_rows(fmt, weights, records)

    alone = [dot_rows(fmt, weights[r : r + 1], records[t : t + 1]) for t, r in np.ndindex(4, 5)]
    assert together.view(np.uint32).ravel().tolist() == np.ravel(alone).view(np.uint32).tolist()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_dot_is_close_to_the_real_product(name: str) -> None:
    fmt = FORMATS[name]
    weights, x = random_rows(fmt, 16, 1024, seed=15), random_f32((3, 1024), seed=16)

    y = dot_rows(fmt, weights, quantize_rows(fmt.activation, x))

    exact = x.astype(np.float64) @ fmt.dequantize_rows(weights).T.astype(np.float64)
    assert np.square(y - exact).sum() < 5e-4 * np.square(exact).sum()


def test_zero_activations_give_positive_zero() -> None:
    fmt = FORMATS["Q6_K"]
    records = quantize_rows(fmt.activation, np.full((1, 256), -0.0, np.float32))
    y = dot_rows(fmt, random_rows(fmt, 8, 256, seed=17), records)
    assert not y.view(np.uint32).any()


def test_dot_wants_whole_blocks() -> None:
    with pytest.raises(ValueError, match="145 bytes are not a whole number of Q4_K"):
        dot_rows(FORMATS["Q4_K"], np.zeros((1, 145), np.uint8), np.zeros((1, 384), np.uint8))


# -- elementwise -------------------------------------------------------------------------------


def test_exp_is_within_one_ulp() -> None:
    x = np.concatenate([np.linspace(-87, 88.7, 200001), np.linspace(-0.4, 0.4, 100001)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))

    error = np.abs(exp(x) - exact) / np.spacing(exact.astype(np.float32))

    assert error.max() < 1.0


def test_exp_subnormal_results() -> None:
    x = np.linspace(-104.5, -87, 20001).astype(np.float32)
    error = np.abs(exp(x) - np.exp(x.astype(np.float64)))
    assert error.max() <= 2.0**-149


def test_exp_at_the_ends() -> None:
    ends = np.array([0, -0.0, 88.7228, 88.8, np.inf, -104, -1e30, -np.inf, np.nan], np.float32)
    y = exp(ends)
    assert y[:2].tolist() == [1.0, 1.0] and np.isfinite(y[2])
    assert y[3:5].tolist() == [np.inf] * 2
    assert y[5:8].tolist() == [0.0] * 3
    assert np.isnan(y[8])


def test_exp_never_decreases() -> None:
    x = np.linspace(-110, 95, 500001).astype(np.float32)
    y = exp(x)
    assert all(a <= b for a, b in pairwise(y[::500])) and (np.diff(y[y < np.inf]) >= 0).all()


def test_silu_mul() -> None:
    gate = np.linspace(-30, 30, 10001).astype(np.float32)
    up = random_f32(gate.shape, seed=18)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(silu_mul(gate, up), exact, rtol=5e-7)


def test_silu_mul_at_the_ends() -> None:
    gate = np.array([-200, 200, np.nan, np.inf], np.float32)
    y = silu_mul(gate, np.ones(4, np.float32))
    assert y[:2].tolist() == [0.0, 200.0] and np.isnan(y[2]) and y[3] == np.inf


def test_combine_adds_in_the_given_order() -> None:
    weights, outputs = random_f32((2, 3), seed=19), random_f32((2, 3, 40), seed=20)
    residual = random_f32((2, 40), seed=21)

    y = combine(weights, outputs, residual)

    for t, i in np.ndindex(2, 40):
        total = np.float32(0)
        for k in range(3):
            product = Fraction(float(weights[t, k])) * Fraction(float(outputs[t, k, i]))
            total = rounded(product + Fraction(float(total)))
        assert y[t, i] == total + residual[t, i]
    np.testing.assert_array_equal(combine(weights, outputs) + residual, y)


def test_combine_of_a_shared_expert_with_weight_one_is_an_addition() -> None:
    outputs = random_f32((1, 2, 64), seed=22)
    weights = np.array([[0.25, 1.0]], np.float32)
    routed = combine(weights[:, :1], outputs[:, :1])
    np.testing.assert_array_equal(combine(weights, outputs), routed + outputs[:, 1])
