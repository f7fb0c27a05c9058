"""Small vector loops over f32 rows with a fixed order of additions, emitted as LLVM IR.

Each sum has 16 lanes (or 4 x 16), whatever registers the processor has, so a row gives the same
bits everywhere and beside any other rows.  Lengths are multiples of 16 where the name says `16`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)


def constant(value: int) -> Any:
    """An i64 constant."""
    return ir.Constant(I64, value)


def splat(builder: Any, value: Any) -> Any:
    """A vector of 16 times one scalar."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(
        one, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    )


def zero() -> Any:
    """A vector of 16 zeros."""
    return ir.Constant(VECTOR, [0.0] * LANES)


def load(builder: Any, address: Any, kind: Any = F32, count: int = LANES) -> Any:
    """`count` elements of the IR type `kind` at an address without alignment."""
    wanted = ir.VectorType(kind, count) if count > 1 else kind
    value = builder.load(builder.inttoptr(address, wanted.as_pointer()), typ=wanted)
    value.align = 1
    return value


def store(builder: Any, address: Any, value: Any) -> None:
    """Store a scalar or vector at an address without alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of scalars or vectors, rounded once."""
    kind = "f32" if c.type == F32 else f"v{c.type.count}f32"
    function_type = ir.FunctionType(c.type, [c.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.{kind}")
    return builder.call(function, [a, b, c])


def at(builder: Any, base: Any, index: Any, scale: int) -> Any:
    """base + index * scale."""
    return builder.add(base, builder.mul(index, constant(scale)))


def emit_each(builder: Any, n: Any, body: Callable[[Any, int], None]) -> None:
    """A loop of body(index, 16) over whole vectors, then of body(index, 1) over the rest."""
    n_vectors = builder.sdiv(n, constant(LANES))
    with cgutils.for_range(builder, n_vectors) as loop:
        body(builder.mul(loop.index, constant(LANES)), LANES)
    first = builder.mul(n_vectors, constant(LANES))
    with cgutils.for_range(builder, builder.sub(n, first)) as loop:
        body(builder.add(first, loop.index), 1)


def tree_sum(builder: Any, vector: Any) -> Any:
    """The 16 lanes added by halves: lane i + lane i + 8, then 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        picks = ir.VectorType(I32, width)
        low = builder.shuffle_vector(vector, vector, ir.Constant(picks, list(range(width))))
        high = builder.shuffle_vector(
            vector, vector, ir.Constant(picks, list(range(width, 2 * width)))
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


def accumulators(builder: Any, count: int) -> list[Any]:
    """Zeroed vector variables in the entry block; LLVM turns them into registers."""
    slots = [cgutils.alloca_once(builder, VECTOR) for _ in range(count)]
    for slot in slots:
        builder.store(zero(), slot)
    return slots


def _dot(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Code that multiplies two rows into 4 vector accumulators, then adds those up.

    Element i goes to accumulator (i // 16) % 4, lane i % 16; elements past a multiple of 16 to lane
    0, 1, ... of accumulator 0 after all others.
    """

    x, y, n = args
    slots = accumulators(builder, 4)

    def step(index: Any, slot: Any) -> None:
        total = builder.load(slot, typ=VECTOR)
        a = load(builder, at(builder, x, index, 4))
        b = load(builder, at(builder, y, index, 4))
        builder.store(fma(builder, a, b, total), slot)

    n_full = builder.sdiv(n, constant(4 * LANES))
    with cgutils.for_range(builder, n_full) as outer:
        for j, slot in enumerate(slots):
            step(builder.add(builder.mul(outer.index, constant(64)), constant(16 * j)), slot)
    first = builder.mul(n_full, constant(64))
    n_more = builder.sdiv(builder.sub(n, first), constant(LANES))
    with cgutils.for_range(builder, n_more) as more:
        step(builder.add(first, builder.mul(more.index, constant(LANES))), slots[0])
    first = builder.add(first, builder.mul(n_more, constant(LANES)))
    with cgutils.for_range(builder, builder.sub(n, first)) as rest:
        total = builder.load(slots[0], typ=VECTOR)
        index = builder.add(first, rest.index)
        lane = builder.trunc(rest.index, I32)
        a = load(builder, at(builder, x, index, 4), count=1)
        b = load(builder, at(builder, y, index, 4), count=1)
        now = builder.extract_element(total, lane)
        new = fma(builder, a, b, now)
        builder.store(builder.insert_element(total, new, lane), slots[0])
    parts = [builder.load(slot, typ=VECTOR) for slot in slots]
    pair = builder.fadd(builder.fadd(parts[0], parts[2]), builder.fadd(parts[1], parts[3]))
    return tree_sum(builder, pair)


@intrinsic
def dot(_: Any, x: types.Type, y: types.Type, n: types.Type) -> tuple[Any, Any]:
    """dot(x, y, n) -> f32 sum of x[i] * y[i] by fma, in 64 partial sums."""
    return types.float32(types.int64, types.int64, types.int64), _dot


@intrinsic
def sum16(_: Any, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """sum16(x, n) -> f32 sum of n (a multiple of 16) values: lane i % 16, then the halving tree."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (slot,) = accumulators(builder, 1)
        with cgutils.for_range(builder, builder.sdiv(args[1], constant(LANES))) as loop:
            value = load(builder, at(builder, args[0], loop.index, 4 * LANES))
            builder.store(builder.fadd(builder.load(slot, typ=VECTOR), value), slot)
        return tree_sum(builder, builder.load(slot, typ=VECTOR))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def max16(_: Any, x: types.Type, n: types.Type) -> tuple[Any, Any]:
    """max16(x, n) -> f32 maximum of n (a multiple of 16, > 0) values, passing over NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (slot,) = accumulators(builder, 1)
        builder.store(load(builder, args[0]), slot)
        with cgutils.for_range(builder, builder.sdiv(args[1], constant(LANES))) as loop:
            value = load(builder, at(builder, args[0], loop.index, 4 * LANES))
            best = builder.load(slot, typ=VECTOR)
            larger = builder.fcmp_ordered(">", value, best)
            builder.store(builder.select(larger, value, best), slot)
        vector = builder.load(slot, typ=VECTOR)
        width = LANES
        while width > 1:
            width //= 2
            picks = ir.VectorType(I32, width)
            low = builder.shuffle_vector(vector, vector, ir.Constant(picks, list(range(width))))
            high = builder.shuffle_vector(
                vector, vector, ir.Constant(picks, list(range(width, 2 * width)))
            )
            vector = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(vector, I32(0))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def f32_of_bits(_: Any, bits: types.Type) -> tuple[Any, Any]:
    """f32_of_bits(int32) -> the f32 of that bit pattern."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def bits_of_f32(_: Any, value: types.Type) -> tuple[Any, Any]:
    """bits_of_f32(f32) -> int32, its bit pattern."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@intrinsic
def f32_at(_: Any, address: types.Type) -> tuple[Any, Any]:
    """f32_at(address) -> pointer to f32: p[i] without bounds or negative indices."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), codegen
