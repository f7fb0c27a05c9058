"""Rotary position embedding of heads in place, emitted as LLVM IR: 16 pairs at a time.

A pair (x, y) becomes (x cos - y sin, x sin + y cos), each one product and one fma.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ops.cpu.vector import I32, LANES, at, constant, emit_each, fma, load, store


def _rotated(builder: Any, pair: tuple[Any, Any], cos: Any, sin: Any) -> tuple[Any, Any]:
    a, b = pair
    first = fma(builder, a, cos, builder.fneg(builder.fmul(b, sin)))
    return first, fma(builder, a, sin, builder.fmul(b, cos))


@intrinsic
def rotate_halves(
    _: Any, x: types.Type, n_pairs: types.Type, cosines: types.Type, sines: types.Type
) -> tuple[Any, Any]:
    """rotate_halves(x, n_pairs, cosines, sines): pair i is (x[i], x[i + n_pairs])."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, n_pairs, cosines, sines = args

        def body(index: Any, count: int) -> None:
            low = at(builder, x, index, 4)
            high = at(builder, low, n_pairs, 4)
            pair = load(builder, low, count=count), load(builder, high, count=count)
            cos = load(builder, at(builder, cosines, index, 4), count=count)
            sin = load(builder, at(builder, sines, index, 4), count=count)
            for address, value in zip((low, high), _rotated(builder, pair, cos, sin), strict=True):
                store(builder, address, value)

        emit_each(builder, n_pairs, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def rotate_neighbours(
    _: Any, x: types.Type, n_pairs: types.Type, cosines: types.Type, sines: types.Type
) -> tuple[Any, Any]:
    """rotate_neighbours(x, n_pairs, cosines, sines): pair i is (x[2 i], x[2 i + 1])."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, n_pairs, cosines, sines = args

        def body(index: Any, count: int) -> None:
            address = at(builder, x, index, 8)
            cos = load(builder, at(builder, cosines, index, 4), count=count)
            sin = load(builder, at(builder, sines, index, 4), count=count)
            if count == 1:
                following = builder.add(address, constant(4))
                pair = load(builder, address, count=1), load(builder, following, count=1)
                first, second = _rotated(builder, pair, cos, sin)
                store(builder, address, first)
                store(builder, following, second)
                return
            both = load(builder, address, count=2 * LANES)
            pair = (
                _pick(builder, both, both, range(0, 2 * LANES, 2)),
                _pick(builder, both, both, range(1, 2 * LANES, 2)),
            )
            first, second = _rotated(builder, pair, cos, sin)
            order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
            store(builder, address, _pick(builder, first, second, order))

        emit_each(builder, n_pairs, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _pick(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    """The numbered lanes of a followed by b."""
    picks = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(picks)), picks))
