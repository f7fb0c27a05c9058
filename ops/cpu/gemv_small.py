"""Matrix times a few vectors for formats with a float scale for every 32 or 16 weights.

Sixteen units are summed together: their totals fill one vector, in the order of the 16 partials.
"""

from __future__ import annotations

from collections.abc import Callable

from ops.cpu.emitter import F32, I1, I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import CHUNK, SmallBlock
from ops.cpu.gemv import PREFETCH_BYTES, SLOT, add_units
from ops.cpu.operands import Operands, Token

UNITS = 16
"""Partial sums, and the units handled together."""


def small_gemv(e: Emitter, fmt: SmallBlock, m: Operands, tokens: list[Token]) -> None:
    """y[row] for the rows of `m` and units of 32 or 16 values: sixteen partial sums."""
    per_chunk = CHUNK // fmt.unit_elems
    n_units = e.b.udiv(m.n_elems, e.i64(fmt.unit_elems))
    last_unit = e.add(n_units, -1)
    partials = [e.variable(vector(F32, UNITS)) for _ in tokens]
    sums = [e.stack(UNITS // per_chunk * SLOT) for _ in tokens]
    chunk_bytes = -(-per_chunk * fmt.block_bytes // fmt.units_per_block)
    with e.loop(m.row_begin, m.row_end) as row:
        blocks = e.add(m.weights, e.mul(row, m.row_bytes))
        for partial in partials:
            e.put(partial, e.zeros(F32, UNITS))
        with e.loop(0, n_units, UNITS) as first:
            count = e.minimum(e.b.sub(n_units, first), e.unseen(UNITS, m.weights))
            with e.loop(0, count, per_chunk) as lane:
                unit = e.add(first, lane)
                e.prefetch(fmt.block(e, blocks, unit), PREFETCH_BYTES, chunk_bytes)
                weights = fmt.chunk(e, blocks, unit, last_unit)
                dot = e.dot_signed if fmt.signed else e.dot_unsigned
                for i, token in enumerate(tokens):
                    values_at = e.mul(unit, fmt.unit_elems)
                    values = e.load(vector(I8, CHUNK), e.add(token.x, values_at))
                    total = dot(e.zeros(I32, 16), weights, values)
                    e.store(total, e.add(sums[i], e.mul(lane, SLOT // per_chunk)))
            _add_units(e, fmt, blocks, first, count, tokens, sums, partials)
        for partial, token in zip(partials, tokens, strict=True):
            e.store(e.tree_sum(e.get(partial)), e.add(token.y, e.mul(row, 4)))


def _add_units(
    e: Emitter,
    fmt: SmallBlock,
    blocks: Value,
    first: Value,
    count: Value,
    tokens: list[Token],
    sums: list[Value],
    partials: list[Value],
) -> None:
    """Add `count` finished units from number `first` to every token's partial sums."""
    used = e.first_lanes(UNITS, count)
    scale_w = fmt.to_scale(e, _stored_scales(e, fmt, fmt.scale_bits, blocks, first, count))
    min_w = None
    if fmt.has_mins:
        min_w = e.half_to_f32(_stored_scales(e, fmt, fmt.min_scale_bits, blocks, first, count))
    for i, token in enumerate(tokens):
        scale_x = _unit_scales(e, fmt, token, first)
        x_sums = _unit_sums(e, fmt, token, first)
        totals = _sixteen_totals(e, fmt, sums[i])
        offset = fmt.byte_offset(e)
        if offset:
            totals = e.b.sub(totals, e.b.mul(x_sums, e.same(x_sums, offset)))
        p = add_units(e, e.get(partials[i]), used, scale_w, scale_x, totals)
        if min_w is not None:
            signed = e.b.fneg(min_w) if fmt.negative_mins else min_w
            p = add_units(e, p, used, signed, scale_x, x_sums)
        e.put(partials[i], p)


def _stored_scales(
    e: Emitter,
    fmt: SmallBlock,
    bits_of: Callable[..., Value],
    blocks: Value,
    first: Value,
    count: Value,
) -> Value:
    """The stored scales, or mins, of 16 units; those from `count` on repeat the last one."""
    kind = bits_of(e, blocks, first).type
    stored = e.variable(vector(kind, UNITS))
    with e.b.if_else(e.b.icmp_signed("==", count, e.i64(UNITS))) as (whole, part):
        with whole:
            if e.isa == "avx512" and fmt.units_per_block == 1:
                words = _first_words(e, fmt.block(e, blocks, first), fmt.block_bytes)
                start = 16 if bits_of == fmt.min_scale_bits else 0
                e.put(stored, e.b.trunc(e.shift_right(words, start), vector(kind, UNITS)))
            elif fmt.units_per_block > 1 and not fmt.has_mins:
                e.put(stored, fmt.whole_block_scales(e, blocks, first, UNITS))
            else:
                units = [e.add(first, lane) for lane in range(UNITS)]
                e.put(stored, e.vector_of([bits_of(e, blocks, unit) for unit in units]))
        with part:
            last = e.add(count, -1)
            units = [e.add(first, e.minimum(last, lane)) for lane in range(UNITS)]
            e.put(stored, e.vector_of([bits_of(e, blocks, unit) for unit in units]))
    return e.get(stored)


def _first_words(e: Emitter, address: Value, stride: int) -> Value:
    """The first 32 bits, scale below min, of 16 blocks: one gather, 5-10 % of a whole product."""
    offsets = e.constant(I32, range(0, UNITS * stride, stride))
    pointer = e.b.inttoptr(address, I8.as_pointer())
    source, every = e.zeros(I32, UNITS), e.constant(I1, [1] * UNITS)
    name = "llvm.x86.avx512.mask.gather.dpi.512"
    return e.call(name, source.type, source, pointer, offsets, every, e.i32(1))


def _unit_scales(e: Emitter, fmt: SmallBlock, token: Token, first: Value) -> Value:
    """The activation scales of 16 units: f32x16."""
    if fmt.unit_elems == 32:
        return e.load(vector(F32, UNITS), token.scales, e.mul(first, 4))
    shared = e.load(vector(F32, UNITS // 2), token.scales, e.mul(first, 2))
    return e.shuffle(shared, [lane // 2 for lane in range(UNITS)])


def _unit_sums(e: Emitter, fmt: SmallBlock, token: Token, first: Value) -> Value:
    """The sums of the activations of 16 units: i32x16."""
    if fmt.unit_elems == 16:
        return e.widen(e.load(vector(I16, UNITS), token.sums, e.mul(first, 2)), I32, signed=True)
    halves = e.load(vector(I16, 2 * UNITS), token.sums, e.mul(first, 4))
    return e.madd_words(halves, e.same(halves, 1))


def _sixteen_totals(e: Emitter, fmt: SmallBlock, address: Value) -> Value:
    """Sum the lanes of each unit in the stored chunks: i32x16 in the order of the units."""
    n_chunks = UNITS * fmt.unit_elems // CHUNK
    v = [e.load(vector(I32, 16), address, SLOT * i) for i in range(n_chunks)]
    a = e.sums_of_four(*v[:4])
    if fmt.unit_elems == 16:
        return e.shuffle(a, [4 * (unit % 4) + unit // 4 for unit in range(UNITS)])
    b = e.sums_of_four(*v[4:])
    low = [*range(4), *range(8, 12)]
    lanes = [lane + side for side in (0, 16) for lane in low]
    sums = e.b.add(e.shuffle(a, lanes, b), e.shuffle(a, [lane + 4 for lane in lanes], b))
    order = [8 * (unit // 8) + 4 * (unit % 2) + unit % 8 // 2 for unit in range(UNITS)]
    return e.shuffle(sums, order)
