"""Rows that gate other rows: sigmoid, silu and the decay of a delta net, 16 values at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ops.cpu.elementwise import emit_exp, emit_sigmoid_times
from ops.cpu.job import kernel_njit
from ops.cpu.rows import ADDRESS, F32, row_loop
from ops.cpu.vector import F32 as FLOAT
from ops.cpu.vector import LANES, fma, splat

SILU, SIGMOID = 0, 1


def _sigmoid(builder: Any, x: Any) -> Any:
    one: Any = FLOAT(1.0)
    return emit_sigmoid_times(builder, x, splat(builder, one) if _is_vector(x) else one)


def _is_vector(x: Any) -> bool:
    return getattr(x.type, "count", 1) == LANES


def _decay(builder: Any, values: list[Any], scalars: list[Any]) -> Any:
    _, x, bias = values
    rate, floor = scalars
    rated = builder.fmul(builder.fadd(x, bias), rate)
    return emit_exp(builder, builder.fmul(floor, _sigmoid(builder, builder.fneg(rated))))


@intrinsic
def silu_row(_: Any, out: types.Type, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """silu_row(out, x, n): out[i] = x[i] * sigmoid(x[i])."""
    codegen = row_loop(lambda b, v, s: emit_sigmoid_times(b, v[1], v[1]))
    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def silu_gate(_: Any, out: types.Type, gate: types.Type, n: types.Type) -> tuple[Any, Any]:
    """silu_gate(out, gate, n): out[i] *= silu(gate[i])."""
    codegen = row_loop(lambda b, v, s: b.fmul(v[0], emit_sigmoid_times(b, v[1], v[1])))
    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def sigmoid_gate(_: Any, out: types.Type, gate: types.Type, n: types.Type) -> tuple[Any, Any]:
    """sigmoid_gate(out, gate, n): out[i] *= sigmoid(gate[i])."""
    codegen = row_loop(lambda b, v, s: b.fmul(v[0], _sigmoid(b, v[1])))
    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def add_gated(
    _: Any, out: types.Type, x: types.Type, gate: types.Type, n: types.Type
) -> tuple[Any, Any]:
    """add_gated(out, x, gate, n): out[i] = fma(x[i], sigmoid(gate[i]), out[i])."""
    codegen = row_loop(lambda b, v, s: fma(b, v[1], _sigmoid(b, v[2]), v[0]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def fma_row(
    _: Any, out: types.Type, x: types.Type, y: types.Type, n: types.Type
) -> tuple[Any, Any]:
    """fma_row(out, x, y, n): out[i] = fma(x[i], y[i], out[i])."""
    codegen = row_loop(lambda b, v, s: fma(b, v[1], v[2], v[0]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def floored_decay(
    _: Any,
    out: types.Type,
    x: types.Type,
    bias: types.Type,
    n: types.Type,
    rate: types.Type,
    floor: types.Type,
) -> tuple[Any, Any]:
    """floored_decay(out, x, bias, n, rate, floor): exp(floor * sigmoid(-(x + bias) * rate))."""
    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS, F32, F32), row_loop(_decay)


@kernel_njit
def softplus_decay(x, bias, rate):
    """exp(softplus(x + bias) * rate), its inside in double precision: libm has no f32 promise."""
    value = np.float64(x) + np.float64(bias)
    softplus = max(value, 0.0) + math.log1p(math.exp(-abs(value)))
    return np.float32(math.exp(softplus * np.float64(rate)))
