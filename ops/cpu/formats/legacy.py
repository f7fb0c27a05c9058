"""The 32-value blocks: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0."""

from __future__ import annotations

from typing import ClassVar

from ops.cpu.emitter import I1, I8, I16, I32, I64, Emitter, Value, vector
from ops.cpu.formats.kernel_format import SmallBlock, half_bits


class PairOfBlocks(SmallBlock):
    """A format of 32-value blocks: a chunk is two of them; d f16 @0, m f16 @2 with mins."""

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        second = e.minimum(e.add(unit, 1), last_unit)
        return self.pair(e, self.block(e, row, unit), self.block(e, row, second))

    def pair(self, e: Emitter, first: Value, second: Value) -> Value:
        """i8x64: the bytes of the blocks at two addresses."""
        raise NotImplementedError

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return half_bits(e, self.block(e, row, unit))

    def min_scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return half_bits(e, self.block(e, row, unit), 2)


class Q80(PairOfBlocks):
    """int8 x 32 @2."""

    name = "Q8_0"
    block_bytes = 34
    signed = True

    def pair(self, e: Emitter, first: Value, second: Value) -> Value:
        values = e.concat(e.load(vector(I8, 32), first, 2), e.load(vector(I8, 32), second, 2))
        return e.b.xor(values, e.same(values, e.signed_bias))


class Q40(PairOfBlocks):
    """16 bytes of nibbles @2: 16 low ones, then 16 high ones."""

    name = "Q4_0"
    block_bytes = 18
    max_byte = 15
    offset = 8
    nibbles_at: ClassVar[int] = 2

    def pair(self, e: Emitter, first: Value, second: Value) -> Value:
        return nibble_pair(e, first, second, self.nibbles_at)


class Q41(Q40):
    """As Q4_0 with m @2."""

    name = "Q4_1"
    block_bytes = 20
    offset = 0
    has_mins = True
    nibbles_at = 4


class Q50(Q40):
    """Bit i of the 32 @2 is the fifth of value i; nibbles @6."""

    name = "Q5_0"
    block_bytes = 22
    max_byte = 31
    offset = 16
    nibbles_at = 6
    bits_at: ClassVar[int] = 2

    def pair(self, e: Emitter, first: Value, second: Value) -> Value:
        low, high = (e.b.zext(e.load(I32, block, self.bits_at), I64) for block in (first, second))
        bits = e.b.or_(low, e.b.shl(high, e.i64(32)))
        nibbles = super().pair(e, first, second)
        fifth = e.select(e.b.bitcast(bits, vector(I1, 64)), e.same(nibbles, 16), e.same(nibbles, 0))
        return e.b.or_(nibbles, fifth)


class Q51(Q50):
    """As Q5_0 with m @2."""

    name = "Q5_1"
    block_bytes = 24
    offset = 0
    has_mins = True
    nibbles_at = 8
    bits_at = 4


def nibble_pair(e: Emitter, first: Value, second: Value, offset: int) -> Value:
    """Numbers below 16: of each of two blocks the low nibbles of 16 bytes, then the high ones."""
    packed = [e.load(vector(I8, 16), block, offset) for block in (first, first, second, second)]
    words = e.cast(e.concat(*packed), I16)
    return e.bit_and(e.cast(e.shift_right(words, [*[0] * 8, *[4] * 8] * 2), I8), 0x0F)
