"""Q1_0 and Q2_0: one or two bits a weight, in order, under one scale."""

from __future__ import annotations

from ops.cpu.emitter import I8, I16, Emitter, Value, vector
from ops.cpu.formats.codebook import stored_signs
from ops.cpu.formats.kernel_format import SmallBlock, half_bits


class Q1(SmallBlock):
    """d f16 @0, 128 bits @2: d where set, -d where not."""

    name = "Q1_0"
    block_bytes = 18
    units_per_block = 4
    offset = 1
    max_byte = 2

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        second_half = e.mul(e.b.and_(unit, e.i64(2)), 4)
        bits = stored_signs(e, e.add(self.block(e, row, unit), second_half), 2)
        return e.select(bits, e.constant(I8, [2] * 64), e.zeros(I8, 64))

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return half_bits(e, self.block(e, row, unit))


class Q2(SmallBlock):
    """d f16 @0, 64 bit pairs @2: d (q - 1)."""

    name = "Q2_0"
    block_bytes = 18
    units_per_block = 2
    offset = 1
    max_byte = 3

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        """Each byte four times; the words of a byte pair keep pairs 0 and 1, then 2 and 3."""
        packed = e.load(vector(I8, 16), self.block(e, row, unit), 2)
        words = e.cast(e.shuffle(packed, [weight // 4 for weight in range(64)]), I16)
        even = e.bit_and(e.shift_right(words, [0, 4] * 16), 0x0003)
        odd = e.bit_and(e.shift_right(words, [2, 6] * 16), 0x0300)
        return e.cast(e.b.or_(even, odd), I8)

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return half_bits(e, self.block(e, row, unit))
