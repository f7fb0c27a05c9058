"""Matrix times a few vectors: one row after the other, its weights unpacked once for all tokens.

A row is one sequential stream, which is what DRAM likes best, with a software prefetch ahead of it.
The exact integer total of a unit is the sum of the lanes of a vector; the vectors of P units are
kept and summed together, which yields the P totals in the lanes of one vector.
"""

from __future__ import annotations

from ops.cpu.emitter import F32, I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import CHUNK, SuperBlock
from ops.cpu.operands import Operands, Token

PREFETCH_BYTES = 6144
SLOT = 64
"""Stack bytes kept for each unit or chunk: one accumulator vector."""
BITS_SLOT = 8
"""Stack bytes between stored scales: apart, or a wide load of fresh narrow stores would stall."""


def superblock_gemv(e: Emitter, fmt: SuperBlock, m: Operands, tokens: list[Token]) -> None:
    """y[row] for the rows of `m` and units of 256 values: eight partial sums."""
    n_units = e.b.lshr(m.n_elems, e.i64(8))
    partials = [e.variable(vector(F32, 8)) for _ in tokens]
    sums = [e.stack(8 * SLOT) for _ in tokens]
    mins = [e.stack(8 * SLOT) for _ in tokens]
    scale_bits, min_bits = e.stack(8 * BITS_SLOT), e.stack(8 * BITS_SLOT)
    with e.loop(m.row_begin, m.row_end) as row:
        blocks = e.add(m.weights, e.mul(row, m.row_bytes))
        for partial in partials:
            e.put(partial, e.zeros(F32, 8))
        with e.loop(0, n_units, 8) as first:
            count = e.minimum(e.b.sub(n_units, first), e.unseen(8, m.weights))
            with e.loop(0, count) as lane:
                unit = e.add(first, lane)
                block = e.add(blocks, e.mul(unit, fmt.block_bytes))
                e.prefetch(block, PREFETCH_BYTES, fmt.block_bytes)
                slot = e.mul(lane, SLOT)
                values_at, sums_at = e.mul(unit, 256), e.mul(unit, 32)
                bits_at = e.mul(lane, BITS_SLOT)
                e.store(fmt.scale_bits(e, block), e.add(scale_bits, bits_at))
                if fmt.has_mins:
                    e.store(fmt.min_scale_bits(e, block), e.add(min_bits, bits_at))
                x = [e.add(token.x, values_at) for token in tokens]
                x_sums = [e.load(vector(I16, 16), e.add(t.sums, sums_at)) for t in tokens]
                totals, min_totals = superblock_dots(e, fmt, block, x, x_sums, tokens[0].arranged)
                for i, total in enumerate(totals):
                    e.store(e.accumulator(total), e.add(sums[i], slot))
                for i, total in enumerate(min_totals):
                    e.store(total, e.add(mins[i], slot))
            used = e.first_lanes(8, count)
            scale_w = fmt.to_scale(e, gather_bits(e, scale_bits, 8))
            min_w = e.half_to_f32(gather_bits(e, min_bits, 8)) if fmt.has_mins else None
            for i, token in enumerate(tokens):
                scale_x = e.load(vector(F32, 8), token.scales, e.mul(first, 4))
                p = e.get(partials[i])
                p = add_units(e, p, used, scale_w, scale_x, eight_totals(e, sums[i]))
                if min_w is not None:
                    signed = e.b.fneg(min_w) if fmt.negative_mins else min_w
                    p = add_units(e, p, used, signed, scale_x, eight_totals(e, mins[i], 8))
                e.put(partials[i], p)
        for partial, token in zip(partials, tokens, strict=True):
            e.store(e.tree_sum(e.get(partial)), e.add(token.y, e.mul(row, 4)))


def superblock_dots(
    e: Emitter, fmt: SuperBlock, block: Value, x: list[Value], x_sums: list[Value], arranged: bool
) -> tuple[list[Value], list[Value]]:
    """Vectors whose lanes sum to each token's total (i32x16) and min total (i32x8) of a block.

    x: addresses of 256 values, perhaps in the format's arrangement; x_sums: i16x16 sums of 16.
    """
    if arranged:
        return fmt.dots(e, block, x), []
    sub = fmt.sub_scales(e, block)
    offset = fmt.byte_offset(e)
    totals = []
    for sums in x_sums:
        total = e.zeros(I32, 16)
        if offset:
            correction = e.madd_words(e.b.mul(sub.scales, e.same(sub.scales, -offset)), sums)
            total = e.concat(correction, e.zeros(I32, 8))
        totals.append(total)
    scaled = _packed_dots if e.packs_dots and fmt.max_byte <= 64 else _scaled_dots
    scaled = _signed_dots if fmt.signed else scaled
    totals = scaled(e, fmt, block, sub.scales, x, totals)
    if sub.mins is None:
        return totals, []
    return totals, [e.madd_words(sub.mins, sums) for sums in x_sums]


def _packed_dots(
    e: Emitter, fmt: SuperBlock, block: Value, scales: Value, x: list[Value], totals: list[Value]
) -> list[Value]:
    """Two chunks at a time: sums of four products fit 16 bits and are scaled together."""
    for first in (0, 2):
        weights = [fmt.chunk(e, block, first + i) for i in (0, 1)]
        groups = [4 * (first + i) + lane for lane in range(4) for i in (0, 1)]
        lanes = e.shuffle(scales, [group for group in groups for _ in range(4)])
        for t, address in enumerate(x):
            dots = [
                e.dot_unsigned(
                    e.zeros(I32, 16),
                    weights[i],
                    e.load(vector(I8, CHUNK), address, CHUNK * (first + i)),
                )
                for i in (0, 1)
            ]
            totals[t] = e.dot_words(totals[t], e.pack_words(*dots), lanes)
    return totals


def _scaled_dots(
    e: Emitter, fmt: SuperBlock, block: Value, scales: Value, x: list[Value], totals: list[Value]
) -> list[Value]:
    """One chunk at a time, each sum of two products scaled."""
    for index in range(4):
        weights = fmt.chunk(e, block, index)
        factors = e.shuffle(scales, [4 * index + lane // 8 for lane in range(32)])
        for t, address in enumerate(x):
            values = e.load(vector(I8, CHUNK), address, CHUNK * index)
            totals[t] = e.dot_words(totals[t], e.pair_dots(weights, values), factors)
    return totals


def _signed_dots(
    e: Emitter, fmt: SuperBlock, block: Value, scales: Value, x: list[Value], totals: list[Value]
) -> list[Value]:
    """One chunk at a time, each sum of four products scaled in f32: integers below 2^24 are exact.

    A lane ends below 4 chunks * 4 products * 241 * 127 * 32 = 15.7e6, for byte weights up to 241
    and sub-scales from -32 to 31.  Integer products of 32 bits take twice the time.
    """
    factors = e.to_f32(e.widen(scales, I32, signed=True))
    sums = [e.zeros(F32, 16) for _ in x]
    for index in range(4):
        weights = fmt.chunk(e, block, index)
        chosen = e.shuffle(factors, [4 * index + lane // 4 for lane in range(16)])
        for t, address in enumerate(x):
            values = e.load(vector(I8, CHUNK), address, CHUNK * index)
            dots = e.to_f32(e.dot_signed(e.zeros(I32, 16), weights, values))
            sums[t] = e.fma(dots, chosen, sums[t])
    integers = [e.b.fptosi(lanes, vector(I32, 16)) for lanes in sums]
    return [e.b.add(total, lanes) for total, lanes in zip(totals, integers, strict=True)]


def gather_bits(e: Emitter, address: Value, count: int) -> Value:
    """The stored scales of `count` units as one i16 vector."""
    bits = e.zeros(I16, count)
    for lane in range(count):
        bits = e.insert(bits, e.load(I16, address, BITS_SLOT * lane), lane)
    return bits


def add_units(
    e: Emitter, partials: Value, used: Value, scale_w: Value, scale_x: Value, totals: Value
) -> Value:
    """partials + (scale_w * scale_x) * totals in the used lanes, one fma."""
    zero = e.same(totals, 0)
    scale = e.b.fmul(scale_w, scale_x)
    scale = e.select(used, scale, e.zeros(F32, scale.type.count))
    return e.fma(scale, e.to_f32(e.select(used, totals, zero)), partials)


def eight_totals(e: Emitter, address: Value, lanes: int | None = None) -> Value:
    """Sum each of eight stored vectors of 8 or 16 lanes: i32x8."""
    lanes = lanes or e.accumulator_lanes
    v = [e.load(vector(I32, lanes), address, SLOT * i) for i in range(8)]
    a, b = e.sums_of_four(*v[:4]), e.sums_of_four(*v[4:])
    if lanes == 16:
        ab = e.b.add(
            e.shuffle(a, [*range(8), *range(16, 24)], b),
            e.shuffle(a, [*range(8, 16), *range(24, 32)], b),
        )
        return e.b.add(
            e.shuffle(ab, [*range(4), *range(8, 12)]), e.shuffle(ab, [*range(4, 8), *range(12, 16)])
        )
    return e.b.add(
        e.shuffle(a, [*range(4), *range(8, 12)], b), e.shuffle(a, [*range(4, 8), *range(12, 16)], b)
    )
