"""IQ3_XXS and IQ3_S: four weights a code; magnitudes from a grid, signs beside it."""

from __future__ import annotations

from ops.cpu.emitter import I8, I16, I32, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.cpu.formats import codebook_vbmi as vbmi
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class IQ3XXS(SuperBlock):
    """d f16 @0, 64 codes @2, eight words @66: four 7-bit sign codes under a 4-bit scale."""

    name = "IQ3_XXS"
    block_bytes = 98
    scale_elems = 32
    offset = 64

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        words = self._words(e, block)
        if e.isa == "avx512":
            codes = e.load(vector(I8, 64), block, 2)
            raised = vbmi.grid_of_fours(e, self.name, vbmi.IQ3_XXS, codes, None, self.offset)[index]
            sign_codes = vbmi.multishift(e, (0, 7, 14, 21, 32, 39, 46, 53), e.cast(words, I8))
            signs = vbmi.chunk_mask(e, vbmi.sign_bytes(e, sign_codes), index)
        else:
            table = cb.entry_table(e, self.name, 1, self.offset)
            raised = cb.entries(e, table, e.load(vector(I8, 16), block, 2 + 16 * index), 32)
            signs = cb.spread_signs(e, cb.sign_bytes(e, words), index)
        return cb.flip_signs(e, raised, signs, self.offset)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        tops = e.shift_right(self._words(e, block), 27)
        return SubScales(cb.each_twice(e, e.b.or_(tops, e.same(tops, 1))))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        return cb.scaled(e, super().to_scale(e, bits), 0.25)

    def _words(self, e: Emitter, block: Value) -> Value:
        return e.load(vector(I32, 8), block, 66)


class IQ3S(SuperBlock):
    """d f16 @0, 64 codes @2, their ninth bits @66, 256 sign bits @74, eight nibbles @106."""

    name = "IQ3_S"
    block_bytes = 110
    scale_elems = 32
    offset = 16
    max_byte = 31

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        signs = cb.stored_signs(e, block, 74 + 8 * index)
        return cb.flip_signs(e, self._raised(e, block, index), signs, self.offset)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        nibbles = e.shift_right(e.splat(e.load(I32, block, 106), 8), range(0, 32, 4))
        odd = e.b.or_(e.shift_left(e.bit_and(nibbles, 15), 1), e.constant(I32, [1] * 8))
        return SubScales(cb.each_twice(e, odd))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    def _raised(self, e: Emitter, block: Value, index: int) -> Value:
        if e.isa == "avx512":
            codes = e.load(vector(I8, 64), block, 2)
            ninth = cb.stored_signs(e, block, 66)
            return vbmi.grid_of_fours(e, self.name, vbmi.IQ3_S, codes, ninth, self.offset)[index]
        low = e.load(vector(I8, 16), block, 2 + 16 * index)
        word = e.b.zext(e.load(I16, block, 66 + 2 * index), I32)
        codes = cb.longer_codes(e, low, word, range(16), 0x100)
        return cb.entries(e, cb.entry_table(e, self.name, 1, self.offset), codes, 32)
