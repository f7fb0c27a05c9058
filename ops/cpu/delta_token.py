"""One token of one head of a delta net, as LLVM IR: its matrix is read twice and written once."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ops.cpu.vector import LANES, VECTOR, accumulators, at, constant, fma, load, splat, store, zero

VECTORS_AT_ONCE = 4  # of value channels held in registers


@intrinsic
def delta_token(
    _: Any,
    state: types.Type,
    n: types.Type,
    q: types.Type,
    k: types.Type,
    decay: types.Type,
    v: types.Type,
    beta: types.Type,
    out: types.Type,
) -> tuple[Any, Any]:
    """delta_token(state, n, q, k, decay, v, beta, out): out = M^T q after the update of M.

    state: f32[n][n] M, [key][value], n a multiple of 16; q, k, decay, v, out: f32[n].  M is decayed
    row by row, then k beta (v - M^T k)^T is added.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n = args[1]
        wide = constant(LANES * VECTORS_AT_ONCE)
        n_wide = builder.sdiv(n, wide)
        slots = [accumulators(builder, VECTORS_AT_ONCE) for _ in range(2)]
        with cgutils.for_range(builder, n_wide) as loop:
            _columns(builder, args, builder.mul(loop.index, wide), slots)
        first = builder.mul(n_wide, wide)
        n_more = builder.sdiv(builder.sub(n, first), constant(LANES))
        with cgutils.for_range(builder, n_more) as loop:
            column = builder.add(first, builder.mul(loop.index, constant(LANES)))
            _columns(builder, args, column, [slot[:1] for slot in slots])
        return context.get_dummy_value()

    integers = [types.int64] * 6
    return types.void(*integers, types.float32, types.int64), codegen


def _columns(builder: Any, args: Any, first: Any, slots: list[list[Any]]) -> None:
    """The value channels [first, first + 16 for each slot): no other channel matters to them."""
    state, n, q, k, decay, v, beta, out = args
    seen, answer = slots
    columns = [builder.add(first, constant(LANES * j)) for j in range(len(seen))]

    def address(row: Any, j: int) -> Any:
        return at(builder, state, builder.add(builder.mul(row, n), columns[j]), 4)

    def scalar(row: Any, key: Any) -> Any:
        return load(builder, at(builder, row, key, 4), count=1)

    for slot in (*seen, *answer):
        builder.store(zero(), slot)
    with cgutils.for_range(builder, n) as loop:
        weight = splat(builder, builder.fmul(scalar(decay, loop.index), scalar(k, loop.index)))
        for j, slot in enumerate(seen):
            m = load(builder, address(loop.index, j))
            builder.store(fma(builder, weight, m, builder.load(slot, typ=VECTOR)), slot)
    betas = splat(builder, beta)
    deltas = []
    for j, slot in enumerate(seen):
        value = load(builder, at(builder, v, columns[j], 4))
        seen_value = builder.load(slot, typ=VECTOR)
        deltas.append(builder.fmul(betas, builder.fsub(value, seen_value)))
    with cgutils.for_range(builder, n) as loop:
        kept, key, query = (splat(builder, scalar(x, loop.index)) for x in (decay, k, q))
        for j, slot in enumerate(answer):
            decayed = builder.fmul(kept, load(builder, address(loop.index, j)))
            m = fma(builder, key, deltas[j], decayed)
            store(builder, address(loop.index, j), m)
            builder.store(fma(builder, query, m, builder.load(slot, typ=VECTOR)), slot)
    for j, slot in enumerate(answer):
        store(builder, at(builder, out, columns[j], 4), builder.load(slot, typ=VECTOR))
