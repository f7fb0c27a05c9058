"""Q4_K and Q5_K: 4 or 5 bits, 6-bit scales and mins for each 32 values."""

from __future__ import annotations

from typing import ClassVar

from ops.cpu.emitter import I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats.eights import Eights, NibbleEights
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class Q4K(SuperBlock):
    """d f16 @0, dmin f16 @2, 12 bytes of scales @4, 128 bytes of nibbles @16."""

    name = "Q4_K"
    block_bytes = 144
    max_byte = 15
    has_mins = True
    negative_mins = True
    scale_elems = 32
    nibbles_at: ClassVar[int] = 16
    fifth_bits_at: ClassVar[int | None] = None

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        """32 bytes hold 64 neighbours: the low nibbles, then the high ones."""
        packed = e.load(vector(I8, 32), block, self.nibbles_at + 32 * index)
        words = e.cast(e.twice(packed), I16)
        nibbles = e.shift_right(words, [0] * 16 + [4] * 16)
        return e.bit_and(e.cast(nibbles, I8), 0x0F)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        """Bytes 0-3 are six bits of scales 0-3 under two high bits of scales 4-7, bytes 4-7 the
        same of the mins, bytes 8-11 the low four bits of scales 4-7 under those of the mins."""
        words = e.twice(e.load(vector(I32, 4), block))
        whole = e.shuffle(words, [1, 3, 2, 3, 5, 7, 6, 7])
        low = e.b.and_(
            e.shift_right(whole, [0, 0, 0, 4] * 2),
            e.constant(I32, [0x3F3F3F3F, 0x0F0F0F0F] * 4),
        )
        tops = e.shift_right(e.shuffle(words, [1, 1, 2, 2, 5, 5, 6, 6]), 2)
        high = e.b.and_(tops, e.constant(I32, [0, 0x30303030] * 4))
        codes = e.cast(e.b.or_(low, high), I8)
        return SubScales(self._each_twice(e, codes, 0), self._each_twice(e, codes, 8))

    def eights(self, e: Emitter) -> Eights | None:
        return NibbleEights(self.nibbles_at, self.fifth_bits_at) if e.isa == "avx512" else None

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    def min_scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block, 2)

    @staticmethod
    def _each_twice(e: Emitter, codes: Value, first: int) -> Value:
        """Eight bytes from `first` -> i16x16, every one for two runs of 16 values.

        `codes` holds the same 16 bytes twice, so that no byte leaves its 128-bit lane.
        """
        lanes = [
            lane
            for half in (0, 16)
            for i in range(first + half + half // 4, first + half + half // 4 + 4)
            for lane in (i, 32, i, 32)
        ]
        return e.cast(e.shuffle(codes, lanes, e.zeros(I8, 32)), I16)


class Q5K(Q4K):
    """As Q4_K with 32 bytes of fifth bits @16: bit j of byte i belongs to value 32 j + i."""

    name = "Q5_K"
    block_bytes = 176
    max_byte = 31
    nibbles_at = 48
    fifth_bits_at = 16

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        bits = e.cast(e.twice(e.load(vector(I8, 32), block, 16)), I16)
        low, high = 4 - 2 * index, 3 - 2 * index
        left = e.shift_left(bits, [max(low, 0)] * 16 + [max(high, 0)] * 16)
        fifth = e.shift_right(left, [max(-low, 0)] * 16 + [max(-high, 0)] * 16)
        return e.b.or_(super().chunk(e, block, index), e.bit_and(e.cast(fifth, I8), 0x10))
