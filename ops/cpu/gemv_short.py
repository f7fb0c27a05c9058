"""Matrix times a few vectors where a row is one to four units of 256 values.

`ops.cpu.gemv` sums the vectors of eight units of one row together; a row this short would leave
most of the eight lanes empty.  Here the lanes are shared by eight, four or two rows: `stride` lanes
a row, and the partial sums that a longer row would have count as the zeros they are.
"""

from __future__ import annotations

from ops.cpu.emitter import F32, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import SuperBlock
from ops.cpu.gemv import (
    BITS_SLOT,
    PREFETCH_BYTES,
    SLOT,
    add_units,
    eight_totals,
    gather_bits,
    superblock_dots,
)
from ops.cpu.operands import Operands, Token

LANES = 8
SHORT_ELEMS = 4 * 256
"""Longest row that is short."""


def short_gemv(e: Emitter, fmt: SuperBlock, m: Operands, tokens: list[Token]) -> None:
    """y[row] for the rows of `m`, of at most SHORT_ELEMS values."""
    n_units = e.b.lshr(m.n_elems, e.i64(8))
    stride = _stride(e, n_units)
    n_rows = e.b.udiv(e.i64(LANES), stride)
    sums = [e.stack(LANES * SLOT) for _ in tokens]
    mins = [e.stack(LANES * SLOT) for _ in tokens]
    scale_bits, min_bits = e.stack(LANES * BITS_SLOT), e.stack(LANES * BITS_SLOT)
    results = e.stack(SLOT)
    scales_x = [_repeated_scales(e, token.scales, stride) for token in tokens]
    with e.loop(m.row_begin, m.row_end, n_rows) as row:
        rows_here = e.minimum(e.b.sub(m.row_end, row), n_rows)
        with e.loop(0, rows_here) as r, e.loop(0, n_units) as unit:
            block = e.add(m.weights, e.mul(e.add(row, r), m.row_bytes))
            block = e.add(block, e.mul(unit, fmt.block_bytes))
            e.prefetch(block, PREFETCH_BYTES, fmt.block_bytes)
            lane = e.add(e.mul(r, stride), unit)
            slot, bits_at = e.mul(lane, SLOT), e.mul(lane, BITS_SLOT)
            e.store(fmt.scale_bits(e, block), e.add(scale_bits, bits_at))
            if fmt.has_mins:
                e.store(fmt.min_scale_bits(e, block), e.add(min_bits, bits_at))
            x = [e.add(token.x, e.mul(unit, 256)) for token in tokens]
            x_sums = [e.load(vector(I16, 16), e.add(t.sums, e.mul(unit, 32))) for t in tokens]
            totals, min_totals = superblock_dots(e, fmt, block, x, x_sums, tokens[0].arranged)
            for i, total in enumerate(totals):
                e.store(e.accumulator(total), e.add(sums[i], slot))
            for i, total in enumerate(min_totals):
                e.store(total, e.add(mins[i], slot))
        used = _used(e, stride, n_units, rows_here)
        scale_w = fmt.to_scale(e, gather_bits(e, scale_bits, LANES))
        min_w = e.half_to_f32(gather_bits(e, min_bits, LANES)) if fmt.has_mins else None
        for i, token in enumerate(tokens):
            p = e.zeros(F32, LANES)
            p = add_units(e, p, used, scale_w, scales_x[i], eight_totals(e, sums[i]))
            if min_w is not None:
                signed = e.b.fneg(min_w) if fmt.negative_mins else min_w
                p = add_units(e, p, used, signed, scales_x[i], eight_totals(e, mins[i], LANES))
            e.store(_sum_rows(e, p, stride), results)
            with e.loop(0, rows_here) as r:
                value = e.load(F32, results, e.mul(e.mul(r, stride), 4))
                e.store(value, e.add(token.y, e.mul(e.add(row, r), 4)))


def _stride(e: Emitter, n_units: Value) -> Value:
    """Lanes of a row: the power of two from n_units on, at most 4."""
    stride = e.b.select(e.b.icmp_unsigned(">", n_units, e.i64(1)), e.i64(2), e.i64(1))
    return e.b.select(e.b.icmp_unsigned(">", n_units, e.i64(2)), e.i64(4), stride)


def _repeated_scales(e: Emitter, scales: Value, stride: Value) -> Value:
    """f32x8 whose lane i is the scale number i mod stride."""
    stored = e.stack(4 * LANES)
    with e.loop(0, LANES) as lane:
        index = e.b.and_(lane, e.b.sub(stride, e.i64(1)))
        e.store(e.load(F32, scales, e.mul(index, 4)), e.add(stored, e.mul(lane, 4)))
    return e.load(vector(F32, LANES), stored)


def _used(e: Emitter, stride: Value, n_units: Value, n_rows: Value) -> Value:
    """The mask of lanes that hold a unit."""

    def each(value: Value) -> Value:
        return e.splat(e.b.trunc(value, I32), LANES)

    lanes = e.constant(I32, range(LANES))
    within = e.b.and_(lanes, each(e.b.sub(stride, e.i64(1))))
    in_row = e.b.icmp_unsigned("<", within, each(n_units))
    return e.b.and_(in_row, e.b.icmp_unsigned("<", lanes, each(e.mul(n_rows, stride))))


def _sum_rows(e: Emitter, p: Value, stride: Value) -> Value:
    """The halving tree of each row's partial sums, in the row's first lane.

    Partial sums that are not there add +0, which only makes a negative zero positive.
    """
    p = e.b.fadd(p, e.zeros(F32, LANES))
    for distance, least in ((2, 4), (1, 2)):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        added = e.b.fadd(p, e.shuffle(p, lanes))
        apply = e.b.icmp_unsigned(">=", stride, e.i64(least))
        p = e.b.select(apply, added, p)
    return p
