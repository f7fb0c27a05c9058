"""Matrix times a few vectors, eight blocks of 256 values at a time.

They are neighbours of a row, or, where a row is one to four blocks, those at one place of eight
rows: then the lanes of all vectors are rows, and a row's partial sums are added without moving any.
The format says what is done with eight blocks, see `ops.cpu.formats.eights`; the bits are those of
`ops.cpu.gemv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ops.cpu.emitter import F32, I16, Emitter, Value, vector
from ops.cpu.formats.eights import UNIT, Eights, Heads
from ops.cpu.formats.kernel_format import SuperBlock
from ops.cpu.gemv import PREFETCH_BYTES, SLOT, add_units, eight_totals
from ops.cpu.operands import Operands, Token

LANES = 8
LANE_BYTES = 4 * LANES
SHORT_UNITS = 4
"""Of the longest row that is short."""
SPARE_BYTES = 192
"""Behind a token's extras: the last eight units may be fewer, and the next token's are aligned."""


def room_elems(ways: Eights, n_bytes: int, n_tokens: int) -> int:
    """The longest row of which n_tokens vectors' preparations fit so many bytes."""
    unit_bytes = ways.extra_bytes + UNIT * ways.copies
    return (n_bytes // n_tokens - SPARE_BYTES) // unit_bytes * UNIT


def prepared(
    e: Emitter, ways: Eights, tokens: Sequence[Token], n_elems: Value, scratch: Value
) -> list[Token]:
    """The tokens with x, and sums for the extras, as `ways` wants them."""
    n_units = e.b.lshr(n_elems, e.i64(8))
    extra_bytes = e.align(e.add(e.mul(n_units, ways.extra_bytes), SPARE_BYTES), 64)
    result = []
    for token in tokens:
        target = scratch if ways.copies else token.x
        extra = e.add(scratch, n_elems if ways.copies else 0)
        with e.loop(0, n_units) as unit:
            x, y = e.add(token.x, e.mul(unit, UNIT)), e.add(target, e.mul(unit, UNIT))
            sums = e.add(token.sums, e.mul(unit, 32))
            ways.prepare(e, x, sums, y, e.add(extra, e.mul(unit, ways.extra_bytes)))
        result.append(replace(token, x=target, sums=extra, arranged=True))
        scratch = e.add(extra, extra_bytes)
    return result


def eights_gemv(
    e: Emitter, fmt: SuperBlock, ways: Eights, m: Operands, tokens: list[Token]
) -> None:
    """y[row] for the rows of `m`; tokens as `prepared`."""
    room = _Room(e.stack(LANES * max(ways.codes_bytes, 8)), [e.stack(LANES * SLOT) for _ in tokens])
    n_units = e.b.lshr(m.n_elems, e.i64(8))
    short = e.b.icmp_signed("<=", n_units, e.i64(SHORT_UNITS))
    with e.b.if_else(short) as (few_units, many_units):
        with few_units:
            _eight_rows(e, fmt, ways, m, tokens, n_units, room)
        with many_units:
            _row_by_row(e, fmt, ways, m, tokens, n_units, room)


@dataclass(frozen=True)
class _Room:
    """Addresses: eight blocks' codes; each token's eight vectors of sums."""

    codes: Value
    sums: Sequence[Value]


@dataclass(frozen=True)
class _Blocks:
    """`count` blocks, `stride` bytes from one to the next; their units are `step` apart in x."""

    first: Value
    stride: Value
    count: Value
    step: int


def _row_by_row(
    e: Emitter,
    fmt: SuperBlock,
    ways: Eights,
    m: Operands,
    tokens: list[Token],
    n_units: Value,
    room: _Room,
) -> None:
    partials = [e.variable(vector(F32, LANES)) for _ in tokens]
    with e.loop(m.row_begin, m.row_end) as row:
        weights = e.add(m.weights, e.mul(row, m.row_bytes))
        for partial in partials:
            e.put(partial, e.zeros(F32, LANES))
        with e.loop(0, n_units, LANES) as unit:
            count = e.minimum(e.b.sub(n_units, unit), e.unseen(LANES, m.weights))
            first = e.add(weights, e.mul(unit, fmt.block_bytes))
            e.prefetch(first, PREFETCH_BYTES, LANES * fmt.block_bytes)
            blocks = _Blocks(first, e.i64(fmt.block_bytes), count, 1)
            at = _from_unit(e, ways, tokens, unit)
            heads, totals = _eight_products(e, ways, blocks, at, room)
            used = e.first_lanes(LANES, count)
            for i, token in enumerate(tokens):
                scale_x = e.load(vector(F32, LANES), token.scales, e.mul(unit, 4))
                sums = [e.load(vector(I16, 32), at[i].sums, 64 * half) for half in (0, 1)]
                p = _add(e, fmt, heads, e.get(partials[i]), used, scale_x, totals[i], sums)
                e.put(partials[i], p)
        for partial, token in zip(partials, tokens, strict=True):
            e.store(e.tree_sum(e.get(partial)), e.add(token.y, e.mul(row, 4)))


def _eight_rows(
    e: Emitter,
    fmt: SuperBlock,
    ways: Eights,
    m: Operands,
    tokens: list[Token],
    n_units: Value,
    room: _Room,
) -> None:
    """Partial sums that a longer row would have stay the zeros they are."""
    zeros = e.zeros(F32, LANES)
    partials = [e.stack(SHORT_UNITS * LANE_BYTES) for _ in tokens]
    for address in partials:
        for unit in range(SHORT_UNITS):
            e.store(zeros, address, LANE_BYTES * unit)
    with e.loop(m.row_begin, m.row_end, LANES) as row:
        count = e.minimum(e.b.sub(m.row_end, row), e.unseen(LANES, m.weights))
        used = e.first_lanes(LANES, count)
        weights = e.add(m.weights, e.mul(row, m.row_bytes))
        with e.loop(0, n_units) as unit:
            ahead = e.add(weights, e.mul(unit, LANES * fmt.block_bytes))
            e.prefetch(ahead, PREFETCH_BYTES, LANES * fmt.block_bytes)
            first = e.add(weights, e.mul(unit, fmt.block_bytes))
            at = _from_unit(e, ways, tokens, unit)
            blocks = _Blocks(first, m.row_bytes, count, 0)
            heads, totals = _eight_products(e, ways, blocks, at, room)
            for i, token in enumerate(tokens):
                scale_x = e.splat(e.load(F32, token.scales, e.mul(unit, 4)), LANES)
                sums = e.load(vector(I16, LANES), at[i].sums)
                p = _add(
                    e, fmt, heads, zeros, used, scale_x, totals[i], [e.concat(*[sums] * 4)] * 2
                )
                e.store(p, e.add(partials[i], e.mul(unit, LANE_BYTES)))
        for i, token in enumerate(tokens):
            units = [e.load(vector(F32, LANES), partials[i], LANE_BYTES * u) for u in range(4)]
            p = [e.b.fadd(values, zeros) for values in units]
            y = e.b.fadd(e.b.fadd(p[0], p[2]), e.b.fadd(p[1], p[3]))
            _store_lanes(e, y, e.add(token.y, e.mul(row, 4)), count, room.sums[0])


def _from_unit(e: Emitter, ways: Eights, tokens: list[Token], unit: Value) -> list[Token]:
    """The tokens from a unit on."""
    x, extra = e.mul(unit, UNIT), e.mul(unit, ways.extra_bytes)
    return [replace(t, x=e.add(t.x, x), sums=e.add(t.sums, extra)) for t in tokens]


def _eight_products(
    e: Emitter, ways: Eights, blocks: _Blocks, tokens: list[Token], room: _Room
) -> tuple[Heads, list[Value]]:
    """Headers and, for each token, the totals i32x8; of lanes from `count` on they mean nothing."""
    zero, addresses = e.i64(0), [blocks.first]
    for lane in range(1, LANES):
        offset = e.mul(blocks.stride, lane)
        within = e.b.icmp_signed("<", e.i64(lane), blocks.count)
        addresses.append(e.add(blocks.first, e.b.select(within, offset, zero)))
    heads = ways.heads(e, addresses, room.codes)
    with e.loop(0, blocks.count) as lane:
        block = e.add(blocks.first, e.mul(lane, blocks.stride))
        codes = e.add(room.codes, e.mul(lane, ways.codes_bytes))
        x = [e.add(t.x, e.mul(lane, UNIT * blocks.step)) for t in tokens]
        extras = [e.add(t.sums, e.mul(lane, ways.extra_bytes * blocks.step)) for t in tokens]
        for total, sums in zip(ways.totals(e, block, codes, x, extras), room.sums, strict=True):
            e.store(total, e.add(sums, e.mul(lane, SLOT)))
    return heads, [eight_totals(e, sums) for sums in room.sums]


def _add(
    e: Emitter,
    fmt: SuperBlock,
    heads: Heads,
    partials: Value,
    used: Value,
    scale_x: Value,
    totals: Value,
    sums: Sequence[Value],
) -> Value:
    """Partial sums with eight units added to them."""
    partials = add_units(e, partials, used, heads.scales, scale_x, totals)
    if heads.min_scales is None:
        return partials
    signed = e.b.fneg(heads.min_scales) if fmt.negative_mins else heads.min_scales
    return add_units(e, partials, used, signed, scale_x, _min_totals(e, heads.mins, sums))


def _min_totals(e: Emitter, mins: Sequence[Value], sums: Sequence[Value]) -> Value:
    """Of blocks 0 to 7, i32x8; a lane of 128 bits has what belongs to one block."""
    low, high = (e.madd_words(m, s) for m, s in zip(mins, sums, strict=True))
    mixed = e.add_unpacked(low, high, 1)
    first = [4 * lane + i for i in (0, 1) for lane in range(4)]
    return e.b.add(e.shuffle(mixed, first), e.shuffle(mixed, [i + 2 for i in first]))


def _store_lanes(e: Emitter, values: Value, address: Value, count: Value, room: Value) -> None:
    """Store the first `count` of eight lanes."""
    with e.b.if_else(e.b.icmp_signed("==", count, e.i64(LANES))) as (whole, part):
        with whole:
            e.store(values, address)
        with part:
            e.store(values, room)
            with e.loop(0, count) as lane:
                at = e.mul(lane, 4)
                e.store(e.load(F32, room, at), e.add(address, at))
