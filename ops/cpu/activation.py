"""Quantize a row of activations into the record that the matrix kernels read.

The same bits as `ops.arithmetic.quantize_rows`: int8 values, f32 scales for each group and int16
sums of 16, each part padded with zeros to 64 bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic, register_jitable

from ops.cpu.emitter import F32, I8, I16, I32, Emitter, Value, vector

LANES = 16
"""Values handled together, and the values under one sum."""
INFINITY_BITS = 0x7F800000
SMALLEST_AMAX = 1e-30
ROUNDER = 12582912.0
"""1.5 * 2^23: adding it rounds to an integer, half to even, and leaves it in the low bits."""


@register_jitable
def quantize_row(group: int, x: int, n: int, record: int) -> None:
    """Quantize f32[n] at address `x` into the record at `record`, 64-byte aligned.

    group: values that share a scale, 256 or 32; n is a multiple of it.  For float weights no
    record is needed: their kernels read the row itself.
    """
    if group == 256:
        _quantize(256, x, n, record)
    else:
        _quantize(32, x, n, record)


@intrinsic(prefer_literal=True)
def _quantize(
    _: Any, group: types.Type, x: types.Type, n: types.Type, record: types.Type
) -> tuple[Any, Any]:
    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _emit_row(Emitter(builder), group.literal_value, *args[1:])
        return context.get_dummy_value()

    return types.void(group, types.int64, types.int64, types.int64), codegen


def _emit_row(e: Emitter, group: int, x: Value, n: Value, record: Value) -> None:
    scales = e.add(record, e.align(n, 64))
    n_groups = e.b.udiv(n, e.i64(group))
    sums = e.add(scales, e.align(e.mul(n_groups, 4), 64))
    end = e.add(sums, e.align(e.mul(e.b.udiv(n, e.i64(LANES)), 2), 64))
    for part_end in (scales, sums, end):
        e.store(e.zeros(I8, 64), part_end, -64)
    with e.loop(0, n_groups) as index:
        first = e.mul(index, group)
        address = e.add(x, e.mul(first, 4))
        amax = _largest_magnitude(e, address, group)
        value = e.b.bitcast(amax, F32)
        usable = e.b.and_(
            e.b.icmp_unsigned("<", amax, e.i32(INFINITY_BITS)),
            e.b.fcmp_ordered(">=", value, e.f32(SMALLEST_AMAX)),
        )
        empty = e.b.fcmp_ordered("<", value, e.f32(SMALLEST_AMAX))
        scale = e.b.select(empty, e.f32(0.0), e.b.fdiv(value, e.f32(127.0)))
        e.store(scale, scales, e.mul(index, 4))
        inverse = e.b.select(usable, e.b.fdiv(e.f32(127.0), value), e.f32(0.0))
        _store_values(
            e,
            address,
            group,
            (usable, inverse),
            e.add(record, first),
            e.add(sums, e.b.lshr(first, e.i64(3))),
        )


def _largest_magnitude(e: Emitter, address: Value, group: int) -> Value:
    """The bits of max |x|, an i32: without the sign, floats order as integers, NaN last."""
    largest = e.zeros(I32, LANES)
    for i in range(0, group, LANES):
        bits = e.bit_and(e.load(vector(I32, LANES), address, 4 * i), 0x7FFFFFFF)
        largest = e.call(f"llvm.umax.v{LANES}i32", largest.type, largest, bits)
    return e.call(f"llvm.vector.reduce.umax.v{LANES}i32", I32, largest)


def _store_values(
    e: Emitter, address: Value, group: int, factor: tuple[Value, Value], q: Value, sums: Value
) -> None:
    """Store one group's integers at `q` and their sums of 16 at `sums`.

    factor: whether the group has a finite scale, and 127 / amax.  |x * 127 / amax| rounds to at
    most 127, so no clamp is needed; a group without a finite scale becomes zeros.
    """
    usable, inverse = (e.splat(part, LANES) for part in factor)
    rounder = e.splat(e.f32(ROUNDER), LANES)
    zero = e.zeros(F32, LANES)
    for i in range(0, group, LANES):
        x = e.select(usable, e.load(vector(F32, LANES), address, 4 * i), zero)
        shifted = e.b.fadd(e.b.fmul(x, inverse), rounder)
        integers = e.b.sub(e.cast(shifted, I32), e.cast(rounder, I32))
        e.store(e.b.trunc(integers, vector(I8, LANES)), q, i)
        total = e.call(f"llvm.vector.reduce.add.v{LANES}i32", I32, integers)
        e.store(e.b.trunc(total, I16), sums, i // 8)
