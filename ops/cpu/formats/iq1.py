"""IQ1_S and IQ1_M: eight weights a code from a grid of -1, 0, 1, shifted by an eighth.

Bytes are 8 grid + 1 or - 1, raised by 16; the scale is d/8.
"""

from __future__ import annotations

from collections.abc import Sequence

from ops.cpu.emitter import I8, I16, I32, I64, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class IQ1S(SuperBlock):
    """d f16 @0, 32 codes @2, eight words @34: four times three code bits, scale, shift sign."""

    name = "IQ1_S"
    block_bytes = 50
    scale_elems = 32
    offset = 16
    max_byte = 25

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        high = [3 * i + 4 * (i // 4) for i in range(8)]
        raised = grid_chunk(e, (block, 2 + 8 * index), (block, 34 + 4 * index), high, self.offset)
        lanes = [2 * index + weight // 32 for weight in range(64)]
        return e.b.add(raised, e.shuffle(self._shifts(e, block), lanes))

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        words = e.load(vector(I16, 8), block, 34)
        odd = e.b.or_(e.bit_and(e.shift_right(words, 11), 14), e.same(words, 1))
        return SubScales(e.shuffle(odd, [i // 2 for i in range(16)]))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        return cb.scaled(e, super().to_scale(e, bits), 0.125)

    def _shifts(self, e: Emitter, block: Value) -> Value:
        """i8x8: 1 or -1 for each 32 weights."""
        words = e.load(vector(I16, 8), block, 34)
        sign = e.b.ashr(words, e.same(words, 15))
        return e.b.trunc(e.b.or_(sign, e.same(words, 1)), vector(I8, 8))


class IQ1M(SuperBlock):
    """32 codes @0, 32 nibbles @32: three code bits and the shift sign; four words @48: four 3-bit
    scales each, their top nibbles together the f16 scale."""

    name = "IQ1_M"
    block_bytes = 56
    offset = 16
    max_byte = 25

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        high = range(0, 32, 4)
        raised = grid_chunk(e, (block, 8 * index), (block, 32 + 4 * index), high, self.offset)
        return e.b.add(raised, self._shifts(e, block, index))

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        words = e.load(vector(I16, 4), block, 48)
        wide = e.widen(e.shuffle(words, [i // 4 for i in range(16)]), I32, signed=False)
        threes = e.bit_and(e.shift_right(wide, [0, 3, 6, 9] * 4), 7)
        odd = e.b.or_(e.shift_left(threes, 1), e.same(threes, 1))
        return SubScales(e.b.trunc(odd, vector(I16, 16)))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        words = e.load(I64, block, 48)
        half = e.i64(0)
        for i in range(4):
            nibble = e.b.lshr(words, e.i64(12 + 12 * i))
            half = e.b.or_(half, e.b.and_(nibble, e.i64(15 << 4 * i)))
        return e.b.trunc(half, I16)

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        return cb.scaled(e, super().to_scale(e, bits), 0.125)

    def _shifts(self, e: Emitter, block: Value, index: int) -> Value:
        """i8x64: 1 or -1, the same for each eight weights."""
        word = e.splat(e.load(I32, block, 32 + 4 * index), 8)
        sign = e.b.ashr(e.shift_left(word, range(28, -4, -4)), e.same(word, 31))
        odd = e.b.trunc(e.b.or_(sign, e.same(word, 1)), vector(I8, 8))
        return e.shuffle(odd, [weight // 8 for weight in range(64)])


def grid_chunk(
    e: Emitter,
    low_at: tuple[Value, int],
    high_at: tuple[Value, int],
    starts: Sequence[int],
    offset: int,
) -> Value:
    """i8x64: 8 grid + offset of eight codes.

    Their low bytes lie at `low_at`, address and offset; bits 8 to 10 start at bits `starts` of the
    32-bit word at `high_at`.
    """
    low, word = e.load(vector(I8, 8), *low_at), e.load(I32, *high_at)
    codes = cb.longer_codes(e, low, word, starts, 0x700)
    return cb.entries(e, cb.entry_table(e, "IQ1_S", 8, offset), codes, 64)
