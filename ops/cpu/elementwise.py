"""exp and gated activations in compiled code, 16 values at a time.

exp and silu have the bits of `ops.arithmetic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ops import arithmetic
from ops.cpu.vector import F32, I32, LANES, at, constant, emit_each, fma, load, splat, store

ROUNDER_BITS = int(arithmetic.ROUNDER.view(np.int32))


def emit_exp(builder: Any, x: Any) -> Any:
    """IR of `ops.arithmetic.exp` for a scalar or a vector of f32."""

    def number(value: Any) -> Any:
        return _constant_like(x, float(value))

    def whole(value: int) -> Any:
        return _constant_like(x, value, I32)

    x = builder.select(builder.fcmp_ordered(">", x, number(arithmetic.EXP_MAX)), number(89.0), x)
    x = builder.select(builder.fcmp_ordered("<", x, number(arithmetic.EXP_MIN)), number(-104.0), x)
    shifted = fma(builder, x, number(arithmetic.LOG2_E), number(arithmetic.ROUNDER))
    n = builder.fsub(shifted, number(arithmetic.ROUNDER))
    r = fma(builder, n, number(-arithmetic.LN_2_HIGH), x)
    r = fma(builder, n, number(-arithmetic.LN_2_LOW), r)
    y = number(arithmetic.EXP_COEFFICIENTS[0])
    for coefficient in arithmetic.EXP_COEFFICIENTS[1:]:
        y = fma(builder, y, r, number(coefficient))
    exponent = builder.sub(builder.bitcast(shifted, _like(x, I32)), whole(ROUNDER_BITS))
    half = builder.ashr(exponent, whole(1))

    def power_of_two(power: Any) -> Any:
        bits = builder.shl(builder.add(power, whole(127)), whole(23))
        return builder.bitcast(bits, x.type)

    return builder.fmul(
        builder.fmul(y, power_of_two(half)), power_of_two(builder.sub(exponent, half))
    )


def emit_sigmoid_times(builder: Any, x: Any, numerator: Any) -> Any:
    """IR of numerator / (1 + exp(-x))."""
    one = _constant_like(x, 1.0)
    return builder.fdiv(numerator, builder.fadd(one, emit_exp(builder, builder.fneg(x))))


@intrinsic
def exp(_: Any, x: types.Type) -> tuple[Any, Any]:
    """exp(f32) -> f32, as `ops.arithmetic.exp`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_exp(builder, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def sigmoid(_: Any, x: types.Type) -> tuple[Any, Any]:
    """sigmoid(f32) -> 1 / (1 + e^-x)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_sigmoid_times(builder, args[0], ir.Constant(F32, 1.0))

    return types.float32(types.float32), codegen


@intrinsic
def silu_mul(
    _: Any, gate: types.Type, up: types.Type, out: types.Type, n: types.Type
) -> tuple[Any, Any]:
    """silu_mul(gate, up, out, n): out[i] = gate[i] / (1 + e^-gate[i]) * up[i] at addresses.

    The bits of `ops.arithmetic.silu_mul`; `out` may be `gate`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, out, n = args

        def body(index: Any, count: int) -> None:
            g = load(builder, at(builder, gate, index, 4), count=count)
            u = load(builder, at(builder, up, index, 4), count=count)
            value = builder.fmul(emit_sigmoid_times(builder, g, g), u)
            store(builder, at(builder, out, index, 4), value)

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def oai_mul(
    _: Any, gate: types.Type, up: types.Type, out: types.Type, n: types.Type, alpha: types.Type
) -> tuple[Any, Any]:
    """oai_mul(gate, up, out, n, alpha): out = gate * sigmoid(alpha * gate) * (up + 1)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, out, n, alpha = args

        def body(index: Any, count: int) -> None:
            g = load(builder, at(builder, gate, index, 4), count=count)
            u = load(builder, at(builder, up, index, 4), count=count)
            one = _constant_like(g, 1.0)
            scaled = builder.fmul(_spread(builder, alpha, count), g)
            gated = builder.fmul(g, emit_sigmoid_times(builder, scaled, one))
            value = builder.fmul(gated, builder.fadd(u, one))
            store(builder, at(builder, out, index, 4), value)

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


@intrinsic
def clamp_row(
    _: Any, x: types.Type, n: types.Type, low: types.Type, high: types.Type
) -> tuple[Any, Any]:
    """clamp_row(x, n, low, high): x[i] within [low, high], in place; a NaN stays one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, n, low, high = args

        def body(index: Any, count: int) -> None:
            value = load(builder, at(builder, x, index, 4), count=count)
            for order, bound in ((">", high), ("<", low)):
                bounds = _spread(builder, bound, count)
                beyond = builder.fcmp_ordered(order, value, bounds)
                value = builder.select(beyond, bounds, value)
            store(builder, at(builder, x, index, 4), value)

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), codegen


@intrinsic
def exp_minus(_: Any, x: types.Type, n: types.Type, peak: types.Type) -> tuple[Any, Any]:
    """exp_minus(x, n, peak): x[i] = e^(x[i] - peak) in place, n a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, n, peak = args
        peaks = splat(builder, peak)
        with cgutils.for_range(builder, builder.sdiv(n, constant(LANES))) as loop:
            address = at(builder, x, loop.index, 4 * LANES)
            value = emit_exp(builder, builder.fsub(load(builder, address), peaks))
            store(builder, address, value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


def _spread(builder: Any, value: Any, count: int) -> Any:
    return splat(builder, value) if count == LANES else value


def _like(x: Any, element: Any) -> Any:
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def _constant_like(x: Any, value: float, element: Any = F32) -> Any:
    kind = _like(x, element)
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)
