"""Elementwise loops over f32 rows at addresses, emitted as LLVM IR: 16 values at a time.

Each element is computed alone, so nothing depends on lengths or neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ops.cpu.vector import (
    I32,
    LANES,
    VECTOR,
    accumulators,
    at,
    constant,
    emit_each,
    fma,
    load,
    splat,
    store,
)

F32 = types.float32
ADDRESS = types.int64


def _spread(builder: Any, value: Any, count: int) -> Any:
    return splat(builder, value) if count == LANES else value


def row_loop(compute: Callable[..., Any]) -> Callable[..., Any]:
    """codegen of `out[i] = compute(...)`: args are out, rows..., n, scalars...

    compute(builder, values, scalars): the values of out and of each row, and the scalars.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = [a for a, t in zip(args, signature.args, strict=True) if t == ADDRESS]
        scalars = [a for a, t in zip(args, signature.args, strict=True) if t == F32]
        *rows, n = addresses

        def body(index: Any, count: int) -> None:
            values = [load(builder, at(builder, row, index, 4), count=count) for row in rows]
            spread = [_spread(builder, scalar, count) for scalar in scalars]
            store(builder, at(builder, rows[0], index, 4), compute(builder, values, spread))

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return codegen


@intrinsic
def add_row(_: Any, out: types.Type, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """add_row(out, x, n): out[i] += x[i]."""
    codegen = row_loop(lambda b, v, s: b.fadd(v[0], v[1]))
    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def sum_rows(
    _: Any, out: types.Type, x: types.Type, y: types.Type, n: types.Type
) -> tuple[Any, Any]:
    """sum_rows(out, x, y, n): out[i] = x[i] + y[i]."""
    codegen = row_loop(lambda b, v, s: b.fadd(v[1], v[2]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def add_weighted(
    _: Any, out: types.Type, x: types.Type, n: types.Type, weight: types.Type
) -> tuple[Any, Any]:
    """add_weighted(out, x, n, weight): out[i] = fma(weight, x[i], out[i])."""
    codegen = row_loop(lambda b, v, s: fma(b, s[0], v[1], v[0]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, F32), codegen


@intrinsic
def scale_row(
    _: Any, out: types.Type, x: types.Type, n: types.Type, factor: types.Type
) -> tuple[Any, Any]:
    """scale_row(out, x, n, factor): out[i] = x[i] * factor."""
    codegen = row_loop(lambda b, v, s: b.fmul(v[1], s[0]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, F32), codegen


@intrinsic
def scale_by_row(
    _: Any, out: types.Type, x: types.Type, weight: types.Type, n: types.Type, factor: types.Type
) -> tuple[Any, Any]:
    """scale_by_row(out, x, weight, n, factor): out[i] = (x[i] * factor) * weight[i]."""
    codegen = row_loop(lambda b, v, s: b.fmul(b.fmul(v[1], s[0]), v[2]))
    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS, F32), codegen


@intrinsic
def merge_row(
    _: Any, out: types.Type, x: types.Type, n: types.Type, keep: types.Type, take: types.Type
) -> tuple[Any, Any]:
    """merge_row(out, x, n, keep, take): out[i] = fma(take, x[i], keep * out[i])."""
    codegen = row_loop(lambda b, v, s: fma(b, s[1], v[1], b.fmul(s[0], v[0])))
    return types.void(ADDRESS, ADDRESS, ADDRESS, F32, F32), codegen


@intrinsic
def is_finite_row(_: Any, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """is_finite_row(x, n) -> whether no value is NaN or infinite."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, n = args
        (slot,) = accumulators(builder, 1)
        flag_type = VECTOR

        def body(index: Any, count: int) -> None:
            value = load(builder, at(builder, x, index, 4), count=count)
            lost = builder.fmul(value, _spread(builder, ir.Constant(ir.FloatType(), 0.0), count))
            total = builder.load(slot, typ=flag_type)
            if count == LANES:
                builder.store(builder.fadd(total, lost), slot)
            else:
                first = builder.fadd(builder.extract_element(total, I32(0)), lost)
                builder.store(builder.insert_element(total, first, I32(0)), slot)

        emit_each(builder, n, body)
        total = builder.load(slot, typ=flag_type)
        ordered = builder.fcmp_ordered("==", total, ir.Constant(VECTOR, [0.0] * LANES))
        bits = builder.bitcast(ordered, ir.IntType(LANES))
        return builder.icmp_unsigned("==", bits, ir.Constant(ir.IntType(LANES), -1))

    return types.boolean(ADDRESS, ADDRESS), codegen


@intrinsic
def widen_f16(_: Any, out: types.Type, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """widen_f16(out, x, n): out f32[n] = x f16[n], n a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, x, n = args
        with cgutils.for_range(builder, builder.sdiv(n, constant(LANES))) as loop:
            half = load(builder, at(builder, x, loop.index, 2 * LANES), ir.HalfType())
            store(builder, at(builder, out, loop.index, 4 * LANES), builder.fpext(half, VECTOR))
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


def _half(builder: Any, x: Any, index: Any, count: int) -> Any:
    value = load(builder, at(builder, x, index, 4), count=count)
    half = ir.HalfType()
    return builder.fptrunc(value, half if count == 1 else ir.VectorType(half, count))


@intrinsic
def narrow_f16(_: Any, out: types.Type, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """narrow_f16(out, x, n): out f16[n] = the nearest numbers to x f32[n]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, x, n = args

        def body(index: Any, count: int) -> None:
            store(builder, at(builder, out, index, 2), _half(builder, x, index, count))

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def scatter_f16(
    _: Any, out: types.Type, stride: types.Type, x: types.Type, n: types.Type
) -> tuple[Any, Any]:
    """scatter_f16(out, stride, x, n): the nearest f16 to x[i] at out + i * stride bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, stride, x, n = args

        def body(index: Any, count: int) -> None:
            values = _half(builder, x, index, count)
            address = builder.add(out, builder.mul(index, stride))
            for lane in range(count):
                value = values if count == 1 else builder.extract_element(values, I32(lane))
                store(builder, address, value)
                address = builder.add(address, stride)

        emit_each(builder, n, body)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def store_i8(_: Any, address: types.Type, value: types.Type) -> tuple[Any, Any]:
    """store_i8(address, int64): its low byte."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[0], builder.trunc(args[1], ir.IntType(8)))
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64), codegen
