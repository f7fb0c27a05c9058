"""A thin builder of LLVM vector code in which kernels read like intrinsics.

`Emitter` writes generic vector IR that every processor runs; `ops.cpu.x86` replaces the operations
for which x86 has better instructions.  Addresses are i64 values.  Vectors have the same logical
width for every instruction set (usually 64 bytes); narrower machines split them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

Value = Any
"""An llvmlite value; the package has no types of its own to name."""


def vector(element: ir.Type, lanes: int) -> ir.Type:
    """The vector type <lanes x element>."""
    return ir.VectorType(element, lanes)


class Emitter:
    """Emits at one builder's position; the portable instruction set.

    accumulator_lanes  i32 lanes in which running integer sums are kept
    signed_bias        what `signed` weights must be raised by before `dot_signed`
    packs_dots         sums of four products are cheap enough to scale them as packed words
    tile_tokens        tokens whose sums against one panel are held in registers together
    gemm_tokens        from this many tokens on it pays to unpack panels of rows
    """

    isa = "portable"
    accumulator_lanes = 8
    signed_bias = 0
    packs_dots = False
    gemm_tokens = 8
    tile_tokens = 4

    def __init__(self, builder: Any) -> None:
        self.b = builder

    # Scalars and control flow

    def i64(self, value: int | Value) -> Value:
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def i32(self, value: int) -> Value:
        return ir.Constant(I32, value)

    def f32(self, value: float) -> Value:
        return ir.Constant(F32, value)

    def add(self, a: Value, b: int | Value) -> Value:
        return a if isinstance(b, int) and b == 0 else self.b.add(a, self.i64(b))

    def mul(self, a: Value, b: int | Value) -> Value:
        return self.b.mul(a, self.i64(b))

    def minimum(self, a: Value, b: int | Value) -> Value:
        b = self.i64(b)
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def unseen(self, number: int, address: Value) -> Value:
        """`number` as an i64 that the optimizer does not know: a loop up to it is not unrolled.

        address: any address; its sign bit is clear, but only we know.
        """
        return self.add(self.b.lshr(address, self.i64(63)), number)

    def align(self, a: Value, to: int) -> Value:
        """`a` rounded up to a multiple of `to`, a power of two."""
        return self.b.and_(self.add(a, to - 1), self.i64(-to))

    @contextmanager
    def loop(self, start: int | Value, stop: int | Value, step: int | Value = 1) -> Any:
        """The body of `for index in range(start, stop, step)`; yields the index."""
        with cgutils.for_range_slice(
            self.b, self.i64(start), self.i64(stop), self.i64(step), intp=I64
        ) as (index, _):
            yield index

    # Memory

    def load(self, kind: ir.Type, address: Value, offset: int | Value = 0) -> Value:
        pointer = self.b.inttoptr(self.add(address, offset), kind.as_pointer())
        value = self.b.load(pointer, typ=kind)
        value.align = 1
        return value

    def store(self, value: Value, address: Value, offset: int | Value = 0) -> None:
        pointer = self.b.inttoptr(self.add(address, offset), value.type.as_pointer())
        self.b.store(value, pointer).align = 1

    def variable(self, kind: ir.Type) -> Value:
        """A local variable: read with `get`, written with `put`; it ends up in a register."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(kind)
            slot.align = 64
        return slot

    def get(self, variable: Value) -> Value:
        return self.b.load(variable)

    def put(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    def stack(self, n_bytes: int) -> Value:
        """The address of `n_bytes` of the function's frame, 64-byte aligned."""
        kind = ir.ArrayType(I8, n_bytes)
        with self.b.goto_entry_block():
            slot = self.b.alloca(kind)
            slot.align = 64
            return self.b.ptrtoint(slot, I64)

    def prefetch(self, address: Value, offset: int, n_bytes: int) -> None:
        """Start fetching the lines of `n_bytes` at address + offset; any address is harmless."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        for line in range(offset, offset + n_bytes, 64):
            pointer = self.b.inttoptr(self.add(address, line), I8.as_pointer())
            self.b.call(function, [pointer, self.i32(0), self.i32(3), self.i32(1)])

    # Vectors

    def constant(self, element: ir.Type, values: Iterable[int | float]) -> Value:
        values = list(values)
        return ir.Constant(vector(element, len(values)), values)

    def same(self, value: Value, number: int) -> Value:
        """A vector of `value`'s type that holds one number in every lane."""
        return self.constant(value.type.element, [number] * value.type.count)

    def zeros(self, element: ir.Type, lanes: int) -> Value:
        return self.constant(element, [0.0 if element == F32 else 0] * lanes)

    def splat(self, scalar: Value, lanes: int) -> Value:
        undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
        return self.shuffle(self.b.insert_element(undefined, scalar, self.i32(0)), [0] * lanes)

    def cast(self, value: Value, element: ir.Type) -> Value:
        """The same bits as a vector of `element`."""
        bits = value.type.count * _bits(value.type.element)
        return self.b.bitcast(value, vector(element, bits // _bits(element)))

    def shuffle(self, value: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Pick lanes of `value`, or of `value` followed by `other`."""
        other = ir.Constant(value.type, ir.Undefined) if other is None else other
        return self.b.shuffle_vector(value, other, self.constant(I32, lanes))

    def vector_of(self, scalars: Sequence[Value]) -> Value:
        """A vector of scalars of one type."""
        values = ir.Constant(vector(scalars[0].type, len(scalars)), ir.Undefined)
        for lane, scalar in enumerate(scalars):
            values = self.insert(values, scalar, lane)
        return values

    def concat(self, *values: Value) -> Value:
        """Vectors of one type, a power of two of them, one after the other."""
        parts = list(values)
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            parts = [
                self.shuffle(a, lanes, b) for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    def twice(self, value: Value) -> Value:
        return self.concat(value, value)

    def halves(self, value: Value) -> tuple[Value, Value]:
        half = value.type.count // 2
        return self.shuffle(value, range(half)), self.shuffle(value, range(half, 2 * half))

    def extract(self, value: Value, lane: int) -> Value:
        return self.b.extract_element(value, self.i32(lane))

    def insert(self, value: Value, scalar: Value, lane: int) -> Value:
        return self.b.insert_element(value, scalar, self.i32(lane))

    def bit_and(self, value: Value, mask: int) -> Value:
        return self.b.and_(value, self.same(value, mask))

    def shift_right(self, value: Value, counts: int | Sequence[int]) -> Value:
        """Logical shift by one count or by a count for every lane."""
        return self.b.lshr(value, self._counts(value, counts))

    def shift_left(self, value: Value, counts: int | Sequence[int]) -> Value:
        return self.b.shl(value, self._counts(value, counts))

    def widen(self, value: Value, element: ir.Type, signed: bool) -> Value:
        extend = self.b.sext if signed else self.b.zext
        return extend(value, vector(element, value.type.count))

    def select(self, mask: Value, a: Value, b: Value) -> Value:
        return self.b.select(mask, a, b)

    def first_lanes(self, lanes: int, count: Value) -> Value:
        """The mask of lanes below `count`, an i64."""
        count32 = self.b.trunc(count, I32)
        index = self.constant(I32, range(lanes))
        return self.b.icmp_unsigned("<", index, self.splat(count32, lanes))

    # Floating point

    def to_f32(self, integers: Value) -> Value:
        return self.b.sitofp(integers, vector(F32, integers.type.count))

    def half_to_f32(self, bits: Value) -> Value:
        """i16 vector holding f16 numbers -> f32 vector, by integers and one exact product."""
        lanes = bits.type.count
        wide = self.widen(bits, I32, signed=False)
        magnitude = self.shift_left(self.bit_and(wide, 0x7FFF), 13)
        scaled = self.b.fmul(self.cast(magnitude, F32), self.splat(self.f32(2.0**112), lanes))
        special = self.b.icmp_unsigned(">=", magnitude, self.same(magnitude, 0x7C00 << 13))
        infinite = self.b.or_(magnitude, self.same(magnitude, 0xFF << 23))
        value = self.select(special, infinite, self.cast(scaled, I32))
        sign = self.shift_left(self.bit_and(wide, 0x8000), 16)
        return self.cast(self.b.or_(value, sign), F32)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def tree_sum(self, values: Value) -> Value:
        """p[i] += p[i + P/2] until one f32 is left."""
        while values.type.count > 1:
            values = self.b.fadd(*self.halves(values))
        return self.extract(values, 0)

    # Exact integer dot products: u8 weights x i8 activations

    def pair_dots(self, weights: Value, x: Value) -> Value:
        """i16 sums of two neighbouring products; weights are unsigned and at most 129."""
        products = self.b.mul(self.widen(weights, I16, False), self.widen(x, I16, True))
        return self.b.add(*self._strided(products, 2))

    def dot_unsigned(self, total: Value, weights: Value, x: Value) -> Value:
        """total += i32 sums of four neighbouring products; weights are at most 129."""
        return self.add_pairs(total, self.pair_dots(weights, x))

    def dot_signed(self, total: Value, weights: Value, x: Value) -> Value:
        """total += i32 sums of four neighbouring products; weights are value + signed_bias."""
        products = self.b.mul(self.widen(weights, I16, True), self.widen(x, I16, True))
        wide = self.widen(products, I32, True)
        return self.b.add(total, _reduce(self.b.add, self._strided(wide, 4)))

    def madd_words(self, a: Value, b: Value) -> Value:
        """i32 sums of two neighbouring products of i16."""
        wide_a, wide_b = self.widen(a, I32, True), self.widen(b, I32, True)
        return self.b.add(*self._strided(self.b.mul(wide_a, wide_b), 2))

    def dot_words(self, total: Value, a: Value, b: Value) -> Value:
        """total += i32 sums of two neighbouring products of i16."""
        return self.b.add(total, self.madd_words(a, b))

    def pack_words(self, a: Value, b: Value) -> Value:
        """i32x16 twice -> i16x32: in each 128-bit lane four of a, then four of b; all fit."""
        lanes = [
            lane + side
            for base in range(0, 16, 4)
            for side in (0, 16)
            for lane in range(base, base + 4)
        ]
        return self.b.trunc(self.shuffle(a, lanes, b), vector(I16, 32))

    def add_pairs(self, total: Value, words: Value) -> Value:
        """total += i32 sums of two neighbouring i16."""
        return self.dot_words(total, words, self.same(words, 1))

    # Byte tables

    def lookup16(self, table: Sequence[int], index: Value) -> Value:
        """table[index] of 16 bytes; index is a byte vector of numbers below 16."""
        choices = [self.same(index, number) for number in table]
        for bit in (1, 2, 4, 8):
            tested = self.bit_and(index, bit)
            mask = self.b.icmp_unsigned("!=", tested, self.same(index, 0))
            choices = [
                self.select(mask, odd, even)
                for even, odd in zip(choices[::2], choices[1::2], strict=True)
            ]
        return choices[0]

    # Sums across vectors

    def accumulator(self, total: Value) -> Value:
        """i32x16 -> the narrower vector that running sums are stored as, lanes added."""
        if total.type.count == self.accumulator_lanes:
            return total
        return self.b.add(*self.halves(total))

    def sums_of_four(self, a: Value, b: Value, c: Value, d: Value) -> Value:
        """Each 128-bit lane holds the sums of that lane of a, b, c and d."""
        ab = self.add_unpacked(a, b, 1)
        cd = self.add_unpacked(c, d, 1)
        return self.add_unpacked(ab, cd, 2)

    def add_unpacked(self, a: Value, b: Value, run: int) -> Value:
        """Interleave runs of lanes of a and b within 128-bit lanes, low plus high."""
        lanes = a.type.count
        low = [
            base + i + side * lanes
            for base in range(0, lanes, 4)
            for start in range(0, 2, run)
            for side in (0, 1)
            for i in range(start, start + run)
        ]
        high = [lane + 2 for lane in low]
        return self.b.add(self.shuffle(a, low, b), self.shuffle(a, high, b))

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def _strided(self, value: Value, stride: int) -> list[Value]:
        return [self.shuffle(value, range(i, value.type.count, stride)) for i in range(stride)]

    def _counts(self, value: Value, counts: int | Sequence[int]) -> Value:
        if isinstance(counts, int):
            return self.same(value, counts)
        return self.constant(value.type.element, counts)


def _bits(element: Any) -> int:
    if isinstance(element, ir.IntType):
        return int(element.width)
    return 16 if isinstance(element, ir.HalfType) else 32


def _reduce(add: Callable[[Value, Value], Value], values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total
