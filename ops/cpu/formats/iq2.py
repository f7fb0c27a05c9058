"""IQ2_XXS, IQ2_XS and IQ2_S: eight weights a code; magnitudes 8, 25 or 43, signs beside them."""

from __future__ import annotations

from abc import abstractmethod

from ops.cpu.emitter import I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.cpu.formats import codebook_vbmi as vbmi
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class IQ2(SuperBlock):
    """What the three have in common: d/8 (2 s + 1) grid sign."""

    offset = 64

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        table = cb.entry_table(e, self.name, 1, self.offset)
        raised = cb.entries(e, table, self.codes(e, block, index), 64)
        return cb.flip_signs(e, raised, self.signs(e, block, index), self.offset)

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        return cb.scaled(e, super().to_scale(e, bits), 0.125)

    @abstractmethod
    def codes(self, e: Emitter, block: Value, index: int) -> Value:
        """The eight codes of a chunk, i8x8 or i16x8."""

    @abstractmethod
    def signs(self, e: Emitter, block: Value, index: int) -> Value:
        """The signs of a chunk, i1x64."""


class IQ2XXS(IQ2):
    """d f16 @0, eight groups @2: four codes, then a word of four 7-bit sign codes under a scale."""

    name = "IQ2_XXS"
    block_bytes = 66
    scale_elems = 32

    def codes(self, e: Emitter, block: Value, index: int) -> Value:
        groups = e.load(vector(I8, 16), block, 2 + 16 * index)
        return e.shuffle(groups, [0, 1, 2, 3, 8, 9, 10, 11])

    def signs(self, e: Emitter, block: Value, index: int) -> Value:
        words = self._words(e, block)
        if e.isa == "avx512":
            starts = (0, 7, 14, 21, 32, 39, 46, 53)
            codes = vbmi.multishift(e, starts, e.cast(words, I8))
            return vbmi.chunk_mask(e, vbmi.sign_bytes(e, codes), index)
        return cb.spread_signs(e, cb.sign_bytes(e, words), index)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        tops = e.shift_right(self._words(e, block), 27)
        return SubScales(cb.each_twice(e, e.b.or_(tops, e.same(tops, 1))))

    def _words(self, e: Emitter, block: Value) -> Value:
        return e.shuffle(e.load(vector(I32, 16), block, 2), range(1, 16, 2))


class IQ2XS(IQ2):
    """d f16 @0, 32 words @2: 9-bit code under a 7-bit sign code; 16 nibbles of scales @66."""

    name = "IQ2_XS"
    block_bytes = 74

    def codes(self, e: Emitter, block: Value, index: int) -> Value:
        words = e.load(vector(I16, 8), block, 2 + 16 * index)
        return e.bit_and(words, 511)

    def signs(self, e: Emitter, block: Value, index: int) -> Value:
        codes = e.shift_right(e.load(vector(I16, 32), block, 2), 9)
        if e.isa == "avx512":
            codes8 = e.b.trunc(codes, vector(I8, 32))
            return vbmi.chunk_mask(e, vbmi.sign_bytes(e, codes8), index)
        folded = codes
        for distance in (4, 2, 1):
            folded = e.b.xor(folded, e.shift_right(folded, distance))
        parity = e.shift_left(e.bit_and(folded, 1), cb.SIGN_CODE_BITS)
        bytes_ = e.b.trunc(e.b.or_(codes, parity), vector(I8, 32))
        return cb.spread_signs(e, bytes_, index)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        return SubScales(cb.odd_nibbles(e, block, 66))


class IQ2S(IQ2):
    """d f16 @0, 32 codes @2, 256 sign bits @34, code bits 8 and 9 @66, 16 nibbles @74."""

    name = "IQ2_S"
    block_bytes = 82

    def codes(self, e: Emitter, block: Value, index: int) -> Value:
        low = e.load(vector(I8, 8), block, 2 + 8 * index)
        word = e.b.zext(e.load(I16, block, 66 + 2 * index), I32)
        return cb.longer_codes(e, low, word, range(0, 16, 2), 0x300)

    def signs(self, e: Emitter, block: Value, index: int) -> Value:
        return cb.stored_signs(e, block, 34 + 8 * index)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        return SubScales(cb.odd_nibbles(e, block, 74))
