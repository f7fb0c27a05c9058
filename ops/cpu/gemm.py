"""Matrix times many vectors: panels of sixteen unpacked rows against tiles of tokens.

The same integers and the same float steps in the same order as `ops.cpu.gemv`: the same bits.
"""

from __future__ import annotations

from llvmlite.ir import Type

from ops.cpu.emitter import F32, I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import SmallBlock, SuperBlock
from ops.cpu.operands import Operands, Token, Vectors
from ops.cpu.panel import (
    LANE_BYTES,
    ROWS,
    SUPER_FLOATS,
    SUPER_MINS,
    SUPER_PAIRS,
    SUPER_SCALES,
    SUPER_UNIT,
    Panel,
    unpack_small_blocks,
    unpack_superblocks,
)

MAX_ELEMS = 32768
"""The longest row a panel has room for; longer ones are left to the gemv."""
MAX_TILE, MAX_PARTIALS = 8, 16
ROWS_AT = 0
PARTIALS_AT = ROWS_AT + ROWS * 256
SCALES_AT = PARTIALS_AT + MAX_TILE * MAX_PARTIALS * LANE_BYTES
UNITS_AT = SCALES_AT + (MAX_ELEMS // 16 + 4) * 2 * LANE_BYTES
SCRATCH_BYTES = UNITS_AT + MAX_ELEMS // 256 * SUPER_UNIT


def emit_gemm(
    e: Emitter,
    fmt: SuperBlock | SmallBlock,
    m: Operands,
    vectors: Vectors,
    scratch: Value,
) -> None:
    """All products of the rows of `m` with `vectors`."""
    panel = Panel(e.add(scratch, UNITS_AT), e.add(scratch, SCALES_AT), e.add(scratch, ROWS_AT))
    with e.loop(m.row_begin, m.row_end, ROWS) as row:
        if isinstance(fmt, SuperBlock):
            unpack_superblocks(e, fmt, m, row, panel)
        else:
            unpack_small_blocks(e, fmt, m, row, panel)
        with e.loop(0, vectors.n_tokens, e.tile_tokens) as first:
            tokens = vectors.tokens(e, fmt, m.n_elems, first, e.tile_tokens)
            _emit_tile(e, fmt, m, row, panel, tokens, e.add(scratch, PARTIALS_AT))


def _emit_tile(
    e: Emitter,
    fmt: SuperBlock | SmallBlock,
    m: Operands,
    row: Value,
    panel: Panel,
    tokens: list[Token],
    partials: Value,
) -> None:
    """One panel times one tile: clear the partial sums, add all units, store the results."""
    n_partials = 8 if isinstance(fmt, SuperBlock) else 16
    with e.loop(0, e.unseen(len(tokens) * n_partials, partials)) as i:
        e.store(e.zeros(F32, ROWS), partials, e.mul(i, LANE_BYTES))
    if isinstance(fmt, SuperBlock):
        with e.loop(0, e.b.lshr(m.n_elems, e.i64(8))) as unit:
            slot = e.mul(e.b.and_(unit, e.i64(7)), LANE_BYTES)
            _add_superblock(e, fmt, unit, panel, tokens, e.add(partials, slot))
    else:
        with e.loop(0, e.b.udiv(m.n_elems, e.i64(fmt.unit_elems))) as unit:
            slot = e.mul(e.b.and_(unit, e.i64(15)), LANE_BYTES)
            _add_small_unit(e, fmt, unit, panel, tokens, e.add(partials, slot))
    for i, token in enumerate(tokens):
        sums = [
            e.load(vector(F32, ROWS), partials, LANE_BYTES * (n_partials * i + p))
            for p in range(n_partials)
        ]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [e.b.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        _store_rows(e, sums[0], m, row, token)


def _add_superblock(
    e: Emitter, fmt: SuperBlock, unit: Value, panel: Panel, tokens: list[Token], partials: Value
) -> None:
    """Add one 256-value unit to each token's partial sum."""
    at = e.add(panel.units, e.mul(unit, SUPER_UNIT))
    x = [e.add(token.x, e.mul(unit, 256)) for token in tokens]
    sums = [e.add(token.sums, e.mul(unit, 32)) for token in tokens]
    totals = [e.variable(vector(I32, ROWS)) for _ in tokens]
    starts = [e.zeros(I32, ROWS) for _ in tokens]
    if fmt.byte_offset(e):
        starts = _pair_totals(e, e.add(at, SUPER_PAIRS), sums)
    for total, start in zip(totals, starts, strict=True):
        e.put(total, start)
    with e.loop(0, e.unseen(256 // fmt.scale_elems, at)) as group:
        first = e.mul(group, fmt.scale_elems)
        scales = e.load(vector(I32, ROWS), e.add(at, SUPER_SCALES), e.mul(group, LANE_BYTES))
        added = _tile_dots(
            e,
            fmt,
            e.add(at, e.mul(first, ROWS)),
            [e.add(address, first) for address in x],
            fmt.scale_elems,
            [e.get(total) for total in totals],
            scales,
        )
        for total, value in zip(totals, added, strict=True):
            e.put(total, value)
    scale_w = e.load(vector(F32, ROWS), at, SUPER_FLOATS)
    scale_x = [e.load(F32, token.scales, e.mul(unit, 4)) for token in tokens]
    _add_to_partials(e, 8, partials, scale_w, scale_x, [e.get(total) for total in totals])
    if fmt.has_mins:
        min_w = e.load(vector(F32, ROWS), at, SUPER_FLOATS + LANE_BYTES)
        mins = _pair_totals(e, e.add(at, SUPER_MINS), sums)
        _add_to_partials(e, 8, partials, min_w, scale_x, mins)


def _add_small_unit(
    e: Emitter, fmt: SmallBlock, unit: Value, panel: Panel, tokens: list[Token], partials: Value
) -> None:
    """Add one unit of 32 or 16 values to each token's partial sum."""
    elems = fmt.unit_elems
    first = e.mul(unit, elems)
    offset = fmt.byte_offset(e)
    sums = [_unit_sum(e, token, unit, elems) for token in tokens]
    starts = [e.b.mul(total, e.same(total, -offset)) for total in sums]
    at = e.add(panel.units, e.mul(first, ROWS))
    x = [e.add(token.x, first) for token in tokens]
    totals = _tile_dots(e, fmt, at, x, elems, starts)
    scales = e.add(panel.scales, e.mul(unit, 2 * LANE_BYTES))
    scale_at = e.mul(unit if elems == 32 else e.b.lshr(unit, e.i64(1)), 4)
    scale_x = [e.load(F32, token.scales, scale_at) for token in tokens]
    scale_w = e.load(vector(F32, ROWS), scales)
    _add_to_partials(e, 16, partials, scale_w, scale_x, totals)
    if fmt.has_mins:
        min_w = e.load(vector(F32, ROWS), scales, LANE_BYTES)
        _add_to_partials(e, 16, partials, min_w, scale_x, sums)


def _tile_dots(
    e: Emitter,
    fmt: SuperBlock | SmallBlock,
    weights: Value,
    x: list[Value],
    n_elems: int,
    totals: list[Value],
    scales: Value | None = None,
) -> list[Value]:
    """totals + scales * dot products of `n_elems` values, for every row and token.

    scales: i32 for each row, or None for 1.
    """
    if not e.packs_dots and not fmt.signed:
        return _tile_word_dots(e, fmt, weights, x, n_elems, totals, scales)
    dot = e.dot_signed if fmt.signed else e.dot_unsigned
    dots = totals if scales is None else [e.zeros(I32, ROWS) for _ in x]
    for k in range(0, n_elems, 4):
        four = e.load(vector(I8, 4 * ROWS), weights, k * ROWS)
        dots = [
            dot(total, four, _broadcast(e, address, k, I8))
            for total, address in zip(dots, x, strict=True)
        ]
    if scales is None:
        return dots
    return [
        e.b.add(total, e.b.mul(value, scales)) for total, value in zip(totals, dots, strict=True)
    ]


def _tile_word_dots(
    e: Emitter,
    fmt: SuperBlock | SmallBlock,
    weights: Value,
    x: list[Value],
    n_elems: int,
    totals: list[Value],
    scales: Value | None,
) -> list[Value]:
    """As `_tile_dots` without the four-product instruction: sums of two products are added in
    16 bits as often as their largest value allows, then scaled."""
    factors = e.constant(I16, [1] * 2 * ROWS)
    if scales is not None:
        low = e.bit_and(scales, 0xFFFF)
        factors = e.cast(e.b.or_(low, e.shift_left(scales, 16)), I16)
    per_sum = 4 * max(1, 32767 // (2 * 127 * fmt.max_byte))
    for start in range(0, n_elems, per_sum):
        words = [e.zeros(I16, 2 * ROWS) for _ in x]
        for k in range(start, min(start + per_sum, n_elems), 4):
            four = e.load(vector(I8, 4 * ROWS), weights, k * ROWS)
            words = [
                e.b.add(word, e.pair_dots(four, _broadcast(e, address, k, I8)))
                for word, address in zip(words, x, strict=True)
            ]
        totals = [
            e.dot_words(total, word, factors) for total, word in zip(totals, words, strict=True)
        ]
    return totals


def _broadcast(e: Emitter, address: Value, offset: int, element: Type) -> Value:
    """The four bytes at address + offset for every row, as a vector of `element`."""
    return e.cast(e.splat(e.load(I32, address, offset), ROWS), element)


def _pair_totals(e: Emitter, pairs: Value, sums: list[Value]) -> list[Value]:
    """Sums of 8 pairs of i16 for each row times each token's sums of 16 activations."""
    totals = [e.zeros(I32, ROWS) for _ in sums]
    for i in range(8):
        factors = e.load(vector(I16, 2 * ROWS), pairs, LANE_BYTES * i)
        for t, address in enumerate(sums):
            pair = _broadcast(e, address, 4 * i, I16)
            totals[t] = e.dot_words(totals[t], factors, pair)
    return totals


def _unit_sum(e: Emitter, token: Token, unit: Value, elems: int) -> Value:
    """The sum of a unit's activations in every lane."""
    if elems == 16:
        narrow = e.load(I16, token.sums, e.mul(unit, 2))
        return e.splat(e.b.sext(narrow, I32), ROWS)
    pair = _broadcast(e, e.add(token.sums, e.mul(unit, 4)), 0, I16)
    return e.madd_words(pair, e.same(pair, 1))


def _add_to_partials(
    e: Emitter,
    n_partials: int,
    partials: Value,
    scale_w: Value,
    scale_x: list[Value],
    totals: list[Value],
) -> None:
    """partials[token] = fma(scale_w * scale_x, total, partials[token])."""
    for t, (scale, total) in enumerate(zip(scale_x, totals, strict=True)):
        at = LANE_BYTES * n_partials * t
        p = e.load(vector(F32, ROWS), partials, at)
        product = e.b.fmul(scale_w, e.splat(scale, ROWS))
        e.store(e.fma(product, e.to_f32(total), p), partials, at)


def _store_rows(e: Emitter, values: Value, m: Operands, row: Value, token: Token) -> None:
    """Store the results of those of sixteen rows that `m` has."""
    address = e.add(token.y, e.mul(row, 4))
    left = e.b.sub(m.row_end, row)
    buffer = e.stack(4 * ROWS)
    with e.b.if_else(e.b.icmp_signed(">=", left, e.i64(ROWS))) as (whole, part):
        with whole:
            e.store(values, address)
        with part:
            e.store(values, buffer)
            with e.loop(0, left) as i:
                at = e.mul(i, 4)
                e.store(e.load(F32, e.add(buffer, at)), address, at)
