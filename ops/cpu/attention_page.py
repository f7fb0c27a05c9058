"""The inner loops of attention on one page of one kv head, emitted as LLVM IR.

`scores` multiplies queries with the 32 keys of a page, `row_scores` with keys that lie as values
do, `weigh_values` adds weighted values.  Both
share the page's loads among several query rows; each row's order of additions is the same however
many rows there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ops.cpu.kv_layout import F16_CACHE, F32_CACHE, PAGE_TOKENS, SCALE_DIMS, VALUE_BYTES
from ops.cpu.vector import (
    F32,
    I32,
    LANES,
    VECTOR,
    accumulators,
    at,
    constant,
    fma,
    load,
    splat,
    store,
    zero,
)

HALVES = PAGE_TOKENS // LANES
CHAINS = 2  # partial sums of a score: even and odd dimensions
DIMS_AT_ONCE = 4  # vectors of value dimensions held in registers


@intrinsic(prefer_literal=True)
def scores(
    _: Any,
    cache: types.Type,
    n_rows: types.Type,
    q: types.Type,
    keys: types.Type,
    dim: types.Type,
    out: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    """scores(cache, n_rows, q, keys, dim, out, out_stride): q . k of 32 keys for n_rows queries.

    cache, n_rows: literals.  q: address of n_rows addresses of f32[dim] queries, dim even.  keys:
    the page.  out: f32[n_rows][32], rows `out_stride` bytes apart.
    """
    if not (isinstance(cache, types.IntegerLiteral) and isinstance(n_rows, types.IntegerLiteral)):
        return None  # type: ignore[return-value]
    kind, rows = cache.literal_value, n_rows.literal_value
    integers = [types.int64] * 5

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q, keys, dim, out, out_stride = args
        queries = [
            load(builder, at(builder, q, constant(i), 8), constant(0).type, 1) for i in range(rows)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows * HALVES)]
        for slot in sums:
            builder.store(zero(), slot)
        if kind in (F32_CACHE, F16_CACHE):
            _score_dims(builder, kind, queries, keys, constant(0), dim, sums)
        else:
            _score_scaled(builder, kind, queries, keys, dim, sums)
        for i in range(rows):
            for h in range(HALVES):
                address = builder.add(out, builder.mul(out_stride, constant(i)))
                value = builder.load(sums[i * HALVES + h], typ=VECTOR)
                store(builder, builder.add(address, constant(4 * LANES * h)), value)
        return context.get_dummy_value()

    return types.void(cache, n_rows, *integers), codegen


@intrinsic(prefer_literal=True)
def row_scores(
    _: Any,
    cache: types.Type,
    n_rows: types.Type,
    q: types.Type,
    keys: types.Type,
    dim: types.Type,
    out: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    """row_scores(cache, n_rows, q, keys, dim, out, out_stride): as `scores`, of keys [token][dim].

    n_rows: 1 or 4; dim: padded with zeros to a multiple of 16, as are the queries.
    """
    if not (isinstance(cache, types.IntegerLiteral) and isinstance(n_rows, types.IntegerLiteral)):
        return None  # type: ignore[return-value]
    kind, rows = cache.literal_value, n_rows.literal_value
    integers = [types.int64] * 5
    n_tokens = LANES // rows  # so that the totals of all make one vector

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q, keys, dim, out, out_stride = args
        queries = [
            load(builder, at(builder, q, constant(i), 8), constant(0).type, 1) for i in range(rows)
        ]
        with cgutils.for_range(builder, constant(PAGE_TOKENS // n_tokens)) as loop:
            first = builder.mul(loop.index, constant(n_tokens))
            sums = _row_products(builder, kind, queries, keys, dim, (first, n_tokens))
            totals = _lane_sums(builder, sums)
            for i in range(rows):
                lanes = ir.Constant(
                    ir.VectorType(I32, n_tokens), list(range(i * n_tokens, (i + 1) * n_tokens))
                )
                part = builder.shuffle_vector(totals, totals, lanes)
                row = builder.add(out, builder.mul(out_stride, constant(i)))
                store(builder, at(builder, row, first, 4), part)
        return context.get_dummy_value()

    return types.void(cache, n_rows, *integers), codegen


@intrinsic(prefer_literal=True)
def weigh_values(
    _: Any,
    cache: types.Type,
    n_rows: types.Type,
    weights: types.Type,
    weights_stride: types.Type,
    values: types.Type,
    row_dim: types.Type,
    dim: types.Type,
    first: types.Type,
    end: types.Type,
    out: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    """weigh_values(cache, n_rows, weights, ..., out, ...): out[row] += weights[row][t] * v[t].

    cache, n_rows: literals.  weights: f32[n_rows][32]; values: the page, rows of row_dim numbers of
    which the first dim, a multiple of 16, are added up; first, end: tokens of the page; out:
    f32[n_rows][dim].  Strides are in bytes.
    """
    if not (isinstance(cache, types.IntegerLiteral) and isinstance(n_rows, types.IntegerLiteral)):
        return None  # type: ignore[return-value]
    kind, rows = cache.literal_value, n_rows.literal_value
    integers = [types.int64] * 9

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, weights, weights_stride, values, row_dim, dim, start, end, out, out_stride = args

        def span(first: Any, n_vectors: int) -> None:
            _weigh_span(
                builder, kind, rows, (weights, weights_stride), values, row_dim, (start, end),
                (out, out_stride), first, n_vectors,
            )  # fmt: skip

        wide = constant(LANES * DIMS_AT_ONCE)
        n_wide = builder.sdiv(dim, wide)
        with cgutils.for_range(builder, n_wide) as loop:
            span(builder.mul(loop.index, wide), DIMS_AT_ONCE)
        first = builder.mul(n_wide, wide)
        n_more = builder.sdiv(builder.sub(dim, first), constant(LANES))
        with cgutils.for_range(builder, n_more) as loop:
            span(builder.add(first, builder.mul(loop.index, constant(LANES))), 1)
        return context.get_dummy_value()

    return types.void(cache, n_rows, *integers), codegen


def _load_cached(builder: Any, kind: int, address: Any) -> Any:
    """16 cached numbers as f32, unscaled."""
    if kind == F32_CACHE:
        return load(builder, address)
    if kind == F16_CACHE:
        return builder.fpext(load(builder, address, ir.HalfType()), VECTOR)
    integers = load(builder, address, ir.IntType(8))
    return builder.sitofp(integers, VECTOR)


def _score_dims(
    builder: Any, kind: int, queries: list[Any], keys: Any, first: Any, n_dims: Any, sums: list[Any]
) -> None:
    """sums = products over dimensions [first, first + n_dims), n_dims even, in two chains."""
    chains = [[cgutils.alloca_once(builder, VECTOR) for _ in sums] for _ in range(CHAINS)]
    for slot in chains[0] + chains[1]:
        builder.store(zero(), slot)
    with cgutils.for_range(builder, builder.sdiv(n_dims, constant(CHAINS))) as loop:
        for c in range(CHAINS):
            d = builder.add(
                first, builder.add(builder.mul(loop.index, constant(CHAINS)), constant(c))
            )
            row = at(builder, keys, d, PAGE_TOKENS * VALUE_BYTES[kind])
            k = [
                _load_cached(
                    builder, kind, builder.add(row, constant(LANES * h * VALUE_BYTES[kind]))
                )
                for h in range(HALVES)
            ]
            for i, query in enumerate(queries):
                value = splat(builder, load(builder, at(builder, query, d, 4), count=1))
                for h in range(HALVES):
                    slot = chains[c][i * HALVES + h]
                    builder.store(fma(builder, value, k[h], builder.load(slot, typ=VECTOR)), slot)
    for j, total in enumerate(sums):
        a, b = (builder.load(chain[j], typ=VECTOR) for chain in chains)
        builder.store(builder.fadd(a, b), total)


def _score_scaled(
    builder: Any, kind: int, queries: list[Any], keys: Any, dim: Any, sums: list[Any]
) -> None:
    """q8_0: the sum of each 32 dimensions is multiplied by the keys' scales."""
    scales = at(builder, keys, dim, PAGE_TOKENS)
    parts = [cgutils.alloca_once(builder, VECTOR) for _ in sums]
    with cgutils.for_range(builder, builder.sdiv(dim, constant(SCALE_DIMS))) as loop:
        first = builder.mul(loop.index, constant(SCALE_DIMS))
        _score_dims(builder, kind, queries, keys, first, constant(SCALE_DIMS), parts)
        row = at(builder, scales, loop.index, 4 * PAGE_TOKENS)
        for j, total in enumerate(sums):
            scale = load(builder, builder.add(row, constant(4 * LANES * (j % HALVES))))
            part, now = (builder.load(slot, typ=VECTOR) for slot in (parts[j], total))
            builder.store(fma(builder, part, scale, now), total)


def _row_products(
    builder: Any, kind: int, queries: list[Any], keys: Any, dim: Any, tokens: tuple[Any, int]
) -> list[Any]:
    """Vectors whose lanes add up to q . k, for each query the tokens from the first on."""
    first, n_tokens = tokens
    slots = accumulators(builder, len(queries) * n_tokens)
    n_scales = builder.sdiv(dim, constant(SCALE_DIMS))
    scales = at(builder, keys, dim, PAGE_TOKENS)
    with cgutils.for_range(builder, builder.sdiv(dim, constant(LANES))) as loop:
        d = builder.mul(loop.index, constant(LANES))
        q = [load(builder, at(builder, query, d, 4)) for query in queries]
        for t in range(n_tokens):
            token = builder.add(first, constant(t))
            position = builder.add(builder.mul(token, dim), d)
            k = _load_cached(builder, kind, at(builder, keys, position, VALUE_BYTES[kind]))
            if kind not in (F32_CACHE, F16_CACHE):
                group = builder.sdiv(d, constant(SCALE_DIMS))
                index = builder.add(builder.mul(token, n_scales), group)
                scale = load(builder, at(builder, scales, index, 4), F32, 1)
                k = builder.fmul(k, splat(builder, scale))
            for i, value in enumerate(q):
                slot = slots[i * n_tokens + t]
                builder.store(fma(builder, value, k, builder.load(slot, typ=VECTOR)), slot)
    return [builder.load(slot, typ=VECTOR) for slot in slots]


def _lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane i is the sum of the lanes of vector i, of 16: neighbours first."""
    distance = 1
    while len(vectors) > 1:
        low = [lane & ~distance | (LANES if lane & distance else 0) for lane in range(LANES)]
        high = [index | distance for index in low]
        picks = [ir.Constant(ir.VectorType(I32, LANES), lanes) for lanes in (low, high)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(*(builder.shuffle_vector(a, b, lanes) for lanes in picks))
            for a, b in pairs
        ]
        distance *= 2
    return vectors[0]


def _weigh_span(
    builder: Any,
    kind: int,
    rows: int,
    weights: tuple[Any, Any],
    values: Any,
    row_dim: Any,
    tokens: tuple[Any, Any],
    out: tuple[Any, Any],
    first: Any,
    n_vectors: int,
) -> None:
    """weigh_values on the dimensions [first, first + 16 n_vectors)."""

    def out_address(i: int, j: int) -> Any:
        row = builder.add(out[0], builder.mul(out[1], constant(i)))
        return builder.add(at(builder, row, first, 4), constant(4 * LANES * j))

    totals = [[cgutils.alloca_once(builder, VECTOR) for _ in range(n_vectors)] for _ in range(rows)]
    for i in range(rows):
        for j in range(n_vectors):
            builder.store(load(builder, out_address(i, j)), totals[i][j])
    scales = at(builder, values, row_dim, PAGE_TOKENS)
    n_scales = builder.sdiv(row_dim, constant(SCALE_DIMS))
    with cgutils.for_range(builder, tokens[1], start=tokens[0]) as loop:
        t = loop.index
        position = builder.add(builder.mul(t, row_dim), first)
        row = at(builder, values, position, VALUE_BYTES[kind])
        for j in range(n_vectors):
            v = _load_cached(
                builder, kind, builder.add(row, constant(LANES * j * VALUE_BYTES[kind]))
            )
            for i in range(rows):
                weight_row = builder.add(weights[0], builder.mul(weights[1], constant(i)))
                weight = load(builder, at(builder, weight_row, t, 4), F32, 1)
                if kind not in (F32_CACHE, F16_CACHE):
                    group = builder.sdiv(
                        builder.add(first, constant(LANES * j)), constant(SCALE_DIMS)
                    )
                    index = builder.add(builder.mul(t, n_scales), group)
                    weight = builder.fmul(
                        weight, load(builder, at(builder, scales, index, 4), F32, 1)
                    )
                total = builder.load(totals[i][j], typ=VECTOR)
                builder.store(fma(builder, splat(builder, weight), v, total), totals[i][j])
    for i in range(rows):
        for j in range(n_vectors):
            store(builder, out_address(i, j), builder.load(totals[i][j], typ=VECTOR))
