"""Q2_K and Q3_K: 2 or 3 bits, a small scale for each 16 values."""

from __future__ import annotations

from ops.cpu.emitter import I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class Q2K(SuperBlock):
    """16 bytes of 4-bit scales under 4-bit mins @0, 64 bytes of pairs of bits @16, d f16 @80,
    dmin f16 @82."""

    name = "Q2_K"
    block_bytes = 84
    max_byte = 3
    has_mins = True
    negative_mins = True

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        return two_bits(e, block, 16, index)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        codes = e.load(vector(I8, 16), block)
        scales = e.widen(e.bit_and(codes, 0x0F), I16, signed=False)
        mins = e.shift_right(e.widen(codes, I16, signed=False), 4)
        return SubScales(scales, mins)

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block, 80)

    def min_scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block, 82)


class Q3K(SuperBlock):
    """32 bytes of third bits @0, 64 bytes of pairs of bits @32, 12 bytes of 6-bit scales @96,
    d f16 @108."""

    name = "Q3_K"
    block_bytes = 110
    offset = 4
    max_byte = 7

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        """Bit j of byte i of the third bits belongs to value 32 j + i."""
        bits = e.cast(e.twice(e.load(vector(I8, 32), block)), I16)
        low, high = 2 - 2 * index, 1 - 2 * index
        left = e.shift_left(bits, [max(low, 0)] * 16 + [max(high, 0)] * 16)
        third = e.shift_right(left, [max(-low, 0)] * 16 + [max(-high, 0)] * 16)
        return e.b.or_(two_bits(e, block, 32, index), e.bit_and(e.cast(third, I8), 4))

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        """Scale s, raised by 32: four low bits in the nibbles of bytes 0-7 (8 low nibbles, then 8
        high ones), two high bits at 2 (s / 4) of byte 8 + s % 4.  The load starts two bytes early
        so that it ends with the block."""
        words = e.load(vector(I8, 16), block, 94)
        nibbles = e.cast(e.shuffle(words, [*range(2, 10), *range(2, 10)]), I32)
        low = e.bit_and(e.shift_right(nibbles, [0, 0, 4, 4]), 0x0F0F0F0F)
        tops = e.cast(e.shuffle(words, [*range(10, 14)] * 4), I32)
        high = e.bit_and(e.shift_right(tops, [0, 2, 4, 6]), 0x03030303)
        raised = e.cast(e.b.or_(low, e.shift_left(high, 4)), I8)
        scales = e.widen(raised, I16, signed=False)
        return SubScales(e.b.sub(scales, e.same(scales, 32)))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block, 108)


def two_bits(e: Emitter, block: Value, offset: int, index: int) -> Value:
    """64 values of 2 bits: 32 bytes hold 128 neighbours, bit pair j those from 32 j."""
    half, upper = divmod(index, 2)
    packed = e.cast(e.twice(e.load(vector(I8, 32), block, offset + 32 * half)), I16)
    pairs = e.shift_right(packed, [4 * upper] * 16 + [4 * upper + 2] * 16)
    return e.bit_and(e.cast(pairs, I8), 3)
