"""Unpack sixteen rows of weights once for many tokens: bytes by [n / 4][16 rows][4].

One vector then holds four neighbouring weights of each of sixteen rows, and the lanes of a product
with four broadcast activations are the sixteen rows.  Scales lie row by row too, so no sum is ever
taken across lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite.ir import Type

from ops.cpu.emitter import I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import CHUNK, SmallBlock, SuperBlock
from ops.cpu.operands import Operands

ROWS = 16
LANE_BYTES = 4 * ROWS
"""Bytes of one number for each row: one vector."""

SUPER_BYTES = 256 * ROWS
SUPER_SCALES = SUPER_BYTES
SUPER_PAIRS = SUPER_SCALES + 16 * LANE_BYTES
SUPER_MINS = SUPER_PAIRS + 8 * LANE_BYTES
SUPER_FLOATS = SUPER_MINS + 8 * LANE_BYTES
SUPER_UNIT = SUPER_FLOATS + 2 * LANE_BYTES
"""A 256-value unit of a panel: bytes, i32 scales [16][rows] (the first 8 where they serve 32
values), i16 pairs of scales times -offset [8][rows][2], i16 pairs of mins [8][rows][2], f32 scale
and min scale [2][rows]."""


@dataclass(frozen=True)
class Panel:
    """Where one panel lies.

    units      the bytes (with everything else for superblocks)
    scales     f32[n_units][2][rows] of small blocks: scale, min
    rows       sixteen unpacked rows of 256 bytes, before they are turned
    """

    units: Value
    scales: Value
    rows: Value


def unpack_superblocks(e: Emitter, fmt: SuperBlock, m: Operands, row: Value, panel: Panel) -> None:
    """Fill `panel` with the sixteen rows from `row`; rows from `m.row_end` on repeat the last."""
    n_rows = e.unseen(ROWS, panel.rows)
    words, bits = e.stack(ROWS * 64), e.stack(2 * ROWS * 8)
    with e.loop(0, e.b.lshr(m.n_elems, e.i64(8))) as index:
        unit = e.add(panel.units, e.mul(index, SUPER_UNIT))
        with e.loop(0, n_rows) as r:
            block = e.add(_row_address(e, m, row, r), e.mul(index, fmt.block_bytes))
            _prefetch_next(e, m, block, fmt.block_bytes)
            for i in range(4):
                turned = e.add(panel.rows, e.mul(r, 256))
                e.store(fmt.chunk(e, block, i), turned, CHUNK * i)
            sub = fmt.sub_scales(e, block)
            mins = e.zeros(I16, 16) if sub.mins is None else sub.mins
            e.store(e.concat(sub.scales, mins), words, e.mul(r, 64))
            scale = fmt.scale_bits(e, block)
            e.store(scale, bits, e.mul(r, 8))
            if fmt.has_mins:
                e.store(fmt.min_scale_bits(e, block), e.add(bits, ROWS * 8), e.mul(r, 8))
        with e.loop(0, e.unseen(256, panel.rows), CHUNK) as i:
            _turn(e, e.add(panel.rows, i), 256, e.add(unit, e.mul(i, ROWS)))
        _store_sub_scales(e, fmt, words, unit)
        _store_floats(e, fmt, bits, scale.type, e.add(unit, SUPER_FLOATS))


def unpack_small_blocks(e: Emitter, fmt: SmallBlock, m: Operands, row: Value, panel: Panel) -> None:
    """As `unpack_superblocks`; a last chunk with too few units is filled up with anything."""
    per_chunk = CHUNK // fmt.unit_elems
    n_units = e.b.udiv(m.n_elems, e.i64(fmt.unit_elems))
    last_unit = e.add(n_units, -1)
    n_rows = e.unseen(ROWS, panel.rows)
    bits = [e.stack(2 * ROWS * 8) for _ in range(per_chunk)]
    chunk_bytes = -(-per_chunk * fmt.block_bytes // fmt.units_per_block)
    with e.loop(0, n_units, per_chunk) as unit:
        with e.loop(0, n_rows) as r:
            blocks = _row_address(e, m, row, r)
            _prefetch_next(e, m, fmt.block(e, blocks, unit), chunk_bytes)
            e.store(fmt.chunk(e, blocks, unit, last_unit), panel.rows, e.mul(r, CHUNK))
            for i in range(per_chunk):
                each = e.minimum(e.add(unit, i), last_unit)
                slot = e.add(bits[i], e.mul(r, 8))
                scale = fmt.scale_bits(e, blocks, each)
                e.store(scale, slot)
                if fmt.has_mins:
                    e.store(fmt.min_scale_bits(e, blocks, each), slot, ROWS * 8)
        _turn(e, panel.rows, CHUNK, e.add(panel.units, e.mul(unit, fmt.unit_elems * ROWS)))
        for i in range(per_chunk):
            scales = e.add(panel.scales, e.mul(e.add(unit, i), 2 * LANE_BYTES))
            _store_floats(e, fmt, bits[i], scale.type, scales)


def _row_address(e: Emitter, m: Operands, row: Value, r: Value) -> Value:
    valid = e.minimum(e.add(row, r), e.add(m.row_end, -1))
    return e.add(m.weights, e.mul(valid, m.row_bytes))


def _prefetch_next(e: Emitter, m: Operands, address: Value, n_bytes: int) -> None:
    """Start fetching the same place of the next panel: it arrives while this one is multiplied."""
    e.prefetch(e.add(address, e.mul(m.row_bytes, ROWS)), 0, n_bytes)


def _store_sub_scales(e: Emitter, fmt: SuperBlock, words: Value, unit: Value) -> None:
    """Turn the rows' integer scales and mins and store them in their forms."""
    turned = transpose16([e.load(vector(I32, 16), words, 64 * r) for r in range(ROWS)], e)
    offset = fmt.byte_offset(e)
    for i, pair in enumerate(turned[:8]):
        first = e.b.ashr(e.shift_left(pair, 16), e.same(pair, 16))
        if fmt.scale_elems == 32:
            e.store(first, unit, SUPER_SCALES + LANE_BYTES * i)
        else:
            second = e.b.ashr(pair, e.same(pair, 16))
            e.store(first, unit, SUPER_SCALES + LANE_BYTES * 2 * i)
            e.store(second, unit, SUPER_SCALES + LANE_BYTES * (2 * i + 1))
        if offset:
            scales = e.cast(pair, I16)
            raised = e.b.mul(scales, e.same(scales, -offset))
            e.store(raised, unit, SUPER_PAIRS + LANE_BYTES * i)
    if fmt.has_mins:
        for i, pair in enumerate(turned[8:]):
            e.store(pair, unit, SUPER_MINS + LANE_BYTES * i)


def _store_floats(
    e: Emitter, fmt: SuperBlock | SmallBlock, bits: Value, kind: Type, address: Value
) -> None:
    """Convert the rows' stored scales (and min scales, signed) to f32 and store them.

    bits: sixteen scales of type `kind` 8 bytes apart, then sixteen i16 min scales.
    """
    e.store(fmt.to_scale(e, _gather(e, bits, kind)), address)
    if fmt.has_mins:
        mins = e.half_to_f32(_gather(e, e.add(bits, ROWS * 8), I16))
        e.store(e.b.fneg(mins) if fmt.negative_mins else mins, address, LANE_BYTES)


def _gather(e: Emitter, bits: Value, kind: Type) -> Value:
    gathered = e.zeros(kind, ROWS)
    for r in range(ROWS):
        gathered = e.insert(gathered, e.load(kind, bits, 8 * r), r)
    return gathered


def _turn(e: Emitter, source: Value, stride: int, target: Value) -> None:
    """64 bytes of sixteen rows, `stride` apart -> [16][rows][4] bytes."""
    rows = [e.load(vector(I32, 16), source, stride * r) for r in range(ROWS)]
    for i, turned in enumerate(transpose16(rows, e)):
        e.store(turned, target, LANE_BYTES * i)


def transpose16(rows: list[Value], e: Emitter) -> list[Value]:
    """Sixteen i32x16 -> sixteen i32x16: lane r of vector k is lane k of row r."""
    low = [0, 16, 1, 17]
    high = [2, 18, 3, 19]

    def in_lanes(pattern: list[int]) -> list[int]:
        return [4 * lane + i for lane in range(4) for i in pattern]

    pairs = [
        e.shuffle(rows[r], in_lanes(pattern), rows[r + 1])
        for r in range(0, 16, 2)
        for pattern in (low, high)
    ]
    quads = []
    for r in range(0, 16, 4):
        first_low, first_high, second_low, second_high = pairs[r : r + 4]
        for a, b in ((first_low, second_low), (first_high, second_high)):
            for pattern in ([0, 1, 16, 17], [2, 3, 18, 19]):
                quads.append(e.shuffle(a, in_lanes(pattern), b))
    even = [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
    odd = [lane + 4 for lane in even]
    turned: list[Value] = [None] * 16
    for k in range(4):
        a, b, c, d = (quads[4 * group + k] for group in range(4))
        for side, lanes in enumerate((even, odd)):
            ab, cd = e.shuffle(a, lanes, b), e.shuffle(c, lanes, d)
            turned[4 * side + k] = e.shuffle(ab, even, cd)
            turned[4 * side + 8 + k] = e.shuffle(ab, odd, cd)
    return turned
