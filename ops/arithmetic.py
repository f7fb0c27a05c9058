"""The arithmetic contract in NumPy: what every kernel must compute, bit for bit.

A quantized dot product is exact integers first (one int32 total a unit, see `ops.quants`), then f32
steps in a fixed order that depends on nothing but the row.  Each token of a batch therefore gets
the bits it would get alone, on whatever processor.  Slow and plain on purpose: this is the
definition, the kernels are elsewhere.  NaN counts as one value: its payload is not defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.quants import BlockFormat
from ops.quants.block import ACTIVATION_GROUP, F32, SUM_ELEMS, U8, ActivationKind

Operand = NDArray[Any] | np.float32

RECORD_ALIGN = 64
"""Each part of an activation record starts on a cache line."""

SMALLEST_AMAX = np.float32(1e-30)
"""A group whose largest magnitude is below this counts as zero, so 127 / amax stays finite."""

FLOAT_PARTIALS = 64
"""Partial sums of a row of F32, F16 or BF16 weights."""


def activation_layout(kind: ActivationKind, n: int) -> tuple[int, int, int]:
    """Where the parts of a row's record lie: (scales_offset, sums_offset, row_bytes).

    int8[n] values, f32[n / group] scales and int16[ceil(n / 16)] sums, each padded with zeros to
    64 bytes.  The record of kind "f32" is the row itself: both offsets are its length.

    Raises:
        ValueError: `n` is not a multiple of the group.
    """
    group = ACTIVATION_GROUP[kind]
    if n % group:
        raise ValueError(f"a row of {n} activations is not a whole number of {group}-value groups")
    if kind == "f32":
        return _aligned(4 * n), _aligned(4 * n), _aligned(4 * n)
    scales_offset = _aligned(n)
    sums_offset = scales_offset + _aligned(4 * (n // group))
    return scales_offset, sums_offset, sums_offset + _aligned(2 * -(-n // SUM_ELEMS))


def quantize_rows(kind: ActivationKind, rows: F32) -> U8:
    """f32[n_tokens, n] -> activation records u8[n_tokens, row_bytes].

    q = clamp(rint(x * (127 / amax)), -127, 127) with halves to even, scale = amax / 127.  amax is
    taken on the absolute bit patterns, so a NaN or an infinity reaches the scale and poisons every
    product with the group; its q are 0.

    Raises:
        ValueError: n is not a multiple of the group.
    """
    n_tokens, n = rows.shape
    scales_offset, sums_offset, row_bytes = activation_layout(kind, n)
    records = np.zeros((n_tokens, row_bytes), np.uint8)
    if kind == "f32":
        records[:, : 4 * n] = np.ascontiguousarray(rows).view(np.uint8)
        return records
    groups = np.ascontiguousarray(rows).reshape(n_tokens, -1, ACTIVATION_GROUP[kind])
    magnitudes = groups.view(np.uint32) & np.uint32(0x7FFFFFFF)
    amax = magnitudes.max(-1).view(np.float32)
    empty = amax < SMALLEST_AMAX
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(empty, np.float32(0), np.float32(127) / amax)
        scaled = np.rint(groups * inverse[..., None])
    poisoned = ~np.isfinite(amax)
    scaled[poisoned] = 0
    q = np.clip(scaled, -127, 127).astype(np.int8).reshape(n_tokens, n)
    scales = np.where(empty, np.float32(0), amax / np.float32(127))
    records[:, :n] = q.view(np.uint8)
    _put(records, scales_offset, scales)
    starts = np.arange(0, n, SUM_ELEMS)
    _put(records, sums_offset, np.add.reduceat(q, starts, axis=1, dtype=np.int16))
    return records


def dot_rows(fmt: BlockFormat, weights: U8, records: U8) -> F32:
    """Weights u8[n_rows, row_bytes] x records u8[n_tokens, ...] -> f32[n_tokens, n_rows].

    Unit u adds to partial sum u mod P, first fma(weight scale * activation scale, f32(total), p),
    then the same of the mins; P is 8 for 256-value units and 16 for smaller ones.  Element i of a
    float row adds to partial i mod 64.  A halving tree of plain adds ends both.

    Raises:
        ValueError: `weights` is not a whole number of blocks.
    """
    row_bytes = weights.shape[1]
    n_blocks, rest = divmod(row_bytes, fmt.block_bytes)
    if rest:
        raise ValueError(f"{row_bytes} bytes are not a whole number of {fmt.name} blocks")
    n = n_blocks * fmt.block_elems
    if fmt.activation == "f32":
        values = fmt.dequantize_rows(weights)
        x = np.ascontiguousarray(records[:, : 4 * n]).view(np.float32)
        return _float_dots(values, x)
    return _integer_dots(fmt, weights, records, n)


def n_partials(fmt: BlockFormat) -> int:
    """Partial sums of a row."""
    if fmt.activation == "f32":
        return FLOAT_PARTIALS
    return 8 if fmt.unit_elems == 256 else 16


def fma(a: Operand, b: Operand, c: Operand) -> F32:
    """a * b + c of f32 with one rounding, broadcasting.

    The product is exact in f64.  The sum is rounded to odd there: f64 has more than two bits
    beyond f32, so rounding that to f32 is the same as rounding the exact sum once.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.atleast_1d(product + addend)
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact_even = (lost != 0) & (bits & 1 == 0) & np.isfinite(total)
        bits += np.where(inexact_even, np.where((lost > 0) == (total > 0), 1, -1), 0)
        return total.astype(np.float32).reshape(np.broadcast_shapes(product.shape, addend.shape))


EXP_MIN, EXP_MAX = np.float32(-104.0), np.float32(89.0)
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.1219444e-4)
ROUNDER = np.float32(12582912.0)
"""1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum."""
EXP_COEFFICIENTS = (
    np.float32(0.0013814539415761828),
    np.float32(0.00836874544620514),
    np.float32(0.04166838899254799),
    np.float32(0.1666652113199234),
    np.float32(0.4999999403953552),
    np.float32(1),
    np.float32(1),
)
"""exp(r) on |r| <= ln(2) / 2, highest power first, fitted for the least relative error (3e-9)."""


def exp(x: F32) -> F32:
    """e^x by fma, mul and add alone: within one ulp, 0 and infinity beyond the range, NaN kept.

    x is clamped to [-104, 89] by comparisons that leave a NaN as it is; n = x / ln 2 rounded to an
    integer; the power of two is applied in two halves, so subnormal results round once.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.where(x > EXP_MAX, EXP_MAX, x)
        x = np.where(x < EXP_MIN, EXP_MIN, x).astype(np.float32)
        shifted = fma(x, LOG2_E, ROUNDER)
        n = shifted - ROUNDER
        r = fma(n, -LN_2_LOW, fma(n, -LN_2_HIGH, x))
        y = np.full_like(r, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            y = fma(y, r, coefficient)
        exponent = shifted.view(np.int32) - ROUNDER.view(np.int32)
        half = exponent >> 1
        return (y * _power_of_two(half)) * _power_of_two(exponent - half)


def silu_mul(gate: F32, up: F32) -> F32:
    """gate / (1 + exp(-gate)) * up, the division rounded to nearest."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (gate / (np.float32(1) + exp(-gate))) * up


def combine(weights: F32, outputs: F32, residual: F32 | None = None) -> F32:
    """Weighted sum of expert outputs: f32[n_tokens, k] x f32[n_tokens, k, n] -> f32[n_tokens, n].

    One fma an expert in the given order, from zero; a shared expert is the last of them, its
    weight 1 or its gate.  The residual is added at the end.
    """
    total = np.zeros((outputs.shape[0], outputs.shape[2]), np.float32)
    for i in range(outputs.shape[1]):
        total = fma(weights[:, i, None], outputs[:, i], total)
    return total if residual is None else total + residual


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // RECORD_ALIGN) * RECORD_ALIGN


def _put(records: U8, offset: int, values: NDArray[Any]) -> None:
    bytes_ = np.ascontiguousarray(values).view(np.uint8)
    records[:, offset : offset + bytes_.shape[1]] = bytes_


def _get(records: U8, offset: int, count: int, dtype: type[np.generic]) -> NDArray[Any]:
    n_bytes = count * np.dtype(dtype).itemsize
    return np.ascontiguousarray(records[:, offset : offset + n_bytes]).view(dtype)


def _integer_dots(fmt: BlockFormat, weights: U8, records: U8, n: int) -> F32:
    n_rows = len(weights)
    scales_offset, sums_offset, _ = activation_layout(fmt.activation, n)
    n_groups = n // ACTIVATION_GROUP[fmt.activation]
    q = np.ascontiguousarray(records[:, :n]).view(np.int8)
    scale_x = _get(records, scales_offset, n_groups, np.float32)
    sums = _get(records, sums_offset, -(-n // SUM_ELEMS), np.int16)

    units = fmt.units(np.ascontiguousarray(weights).reshape(-1, fmt.block_bytes))
    n_units = n // fmt.unit_elems
    scale_x = np.repeat(scale_x, n_units // n_groups, axis=1)[:, None, :]
    scale_w = units.scale.reshape(n_rows, n_units)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = [(scale_w * scale_x, _totals(units.weights, q, n_units))]
        if units.min_scale is not None and units.mins is not None:
            min_w = units.min_scale.reshape(n_rows, n_units)
            terms.append((min_w * scale_x, _totals(units.mins, sums, n_units)))
        return _halving_tree(_partial_sums(terms, n_partials(fmt)))


def _totals(integers: NDArray[np.int32], x: NDArray[Any], n_units: int) -> F32:
    """Exact integer dot products of every unit, then to f32: [n_tokens, n_rows, n_units].

    Taken in f64, where sums below 2^53 are exact in any order; the final + 0 turns the -0 of a sum
    of negative zeros into the integer's 0.
    """
    per_unit = integers.shape[-1]
    w = integers.reshape(-1, n_units, per_unit).transpose(1, 2, 0).astype(np.float64)
    x = x.reshape(-1, n_units, per_unit).transpose(1, 0, 2).astype(np.float64)
    totals: F32 = (np.matmul(x, w).transpose(1, 2, 0) + 0.0).astype(np.float32)
    return totals


def _partial_sums(terms: list[tuple[F32, F32]], n_partials: int) -> F32:
    """Sum scale * total over the last axis, entry u into partial sum u mod n_partials."""
    shape = terms[0][1].shape
    partials = np.zeros((*shape[:2], n_partials), np.float32)
    for start in range(0, shape[2], n_partials):
        units = slice(start, min(start + n_partials, shape[2]))
        used = partials[..., : units.stop - start]
        for scale, total in terms:
            used[...] = fma(scale[..., units], total[..., units], used)
    return partials


def _float_dots(weights: F32, x: F32) -> F32:
    shape = (x.shape[0], weights.shape[0], x.shape[1])
    w = np.broadcast_to(weights[None, :, :], shape)
    terms = [(w, np.broadcast_to(x[:, None, :], shape))]
    return _halving_tree(_partial_sums(terms, FLOAT_PARTIALS))


def _halving_tree(partials: F32) -> F32:
    """p[i] += p[i + P/2] until one is left."""
    with np.errstate(over="ignore", invalid="ignore"):
        while partials.shape[-1] > 1:
            half = partials.shape[-1] // 2
            partials = partials[..., :half] + partials[..., half:]
    total: F32 = partials[..., 0]
    return total


def _power_of_two(exponent: NDArray[np.int32]) -> F32:
    return ((exponent + np.int32(127)) << np.int32(23)).view(np.float32)
