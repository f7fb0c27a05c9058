"""IQ3_XXS and IQ3_S: four weights a code; magnitudes from a grid, signs beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ops.cpu.emitter import I8, I16, I32, I64, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.cpu.formats import codebook_vbmi as vbmi
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits

SIGN_CODE_STARTS = (0, 7, 14, 21, 32, 39, 46, 53)
"""First bits of the eight sign codes in two words."""
COLUMNS = [
    8 * octet + 4 * code + weight for weight in range(4) for code in (0, 1) for octet in range(32)
]


class IQ3(SuperBlock):
    """What the two have in common: on AVX-512 the four weights of all 64 codes come as columns.

    A column holds the first codes of the 32 octets, then their second codes.  Signs go to the
    activations, which makes the weights unsigned and their sums need no correction.
    """

    scale_elems = 32

    def arrangement(self, e: Emitter) -> Sequence[int] | None:
        return COLUMNS if e.isa == "avx512" else None

    def dots(self, e: Emitter, block: Value, x: list[Value]) -> list[Value]:
        magnitudes, negative = self.columns(e, block)
        scales = e.twice(self.odd_scales(e, block))
        totals = []
        for address in x:
            total = e.zeros(I32, 16)
            for i in range(4):
                values = e.load(vector(I8, 64), address, 64 * i)
                signed = e.select(negative[i], e.b.neg(values), values)
                total = e.dot_unsigned(total, magnitudes[i], signed)
            totals.append(e.b.mul(total, scales))
        return totals

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        return SubScales(cb.each_twice(e, self.odd_scales(e, block)))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)

    @abstractmethod
    def columns(self, e: Emitter, block: Value) -> tuple[list[Value], list[Value]]:
        """Magnitudes, i8x64, and signs, i1x64, of each weight of the 64 codes; AVX-512 only."""

    @abstractmethod
    def odd_scales(self, e: Emitter, block: Value) -> Value:
        """The sub-scales 2 s + 1: i32x8."""


class IQ3XXS(IQ3):
    """d f16 @0, 64 codes @2, eight words @66: four 7-bit sign codes under a 4-bit scale."""

    name = "IQ3_XXS"
    block_bytes = 98
    offset = 64

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        words = self._words(e, block)
        if e.isa == "avx512":
            codes = e.load(vector(I8, 64), block, 2)
            raised = vbmi.grid_of_fours(e, self.name, vbmi.IQ3_XXS, codes, None, self.offset)[index]
            sign_codes = vbmi.multishift(e, SIGN_CODE_STARTS, e.cast(words, I8))
            signs = vbmi.chunk_mask(e, vbmi.sign_bytes(e, sign_codes), index)
        else:
            table = cb.entry_table(e, self.name, 1, self.offset)
            raised = cb.entries(e, table, e.load(vector(I8, 16), block, 2 + 16 * index), 32)
            signs = cb.spread_signs(e, cb.sign_bytes(e, words), index)
        return cb.flip_signs(e, raised, signs, self.offset)

    def columns(self, e: Emitter, block: Value) -> tuple[list[Value], list[Value]]:
        codes = vbmi.evens_first(e, e.load(vector(I8, 64), block, 2))
        magnitudes = vbmi.columns_of_fours(e, self.name, vbmi.IQ3_XXS, codes, None)
        words = e.cast(e.twice(self._words(e, block)), I8)
        octets = vbmi.multishift(e, SIGN_CODE_STARTS, words)
        return magnitudes, vbmi.sign_columns(e, octets, codes_of_seven=True)

    def odd_scales(self, e: Emitter, block: Value) -> Value:
        tops = e.shift_right(self._words(e, block), 27)
        return e.b.or_(tops, e.same(tops, 1))

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        return cb.scaled(e, super().to_scale(e, bits), 0.25)

    def _words(self, e: Emitter, block: Value) -> Value:
        return e.load(vector(I32, 8), block, 66)


class IQ3S(IQ3):
    """d f16 @0, 64 codes @2, their ninth bits @66, 256 sign bits @74, eight nibbles @106."""

    name = "IQ3_S"
    block_bytes = 110
    offset = 16
    max_byte = 31

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        signs = cb.stored_signs(e, block, 74 + 8 * index)
        return cb.flip_signs(e, self._raised(e, block, index), signs, self.offset)

    def columns(self, e: Emitter, block: Value) -> tuple[list[Value], list[Value]]:
        codes = vbmi.evens_first(e, e.load(vector(I8, 64), block, 2))
        ninth = vbmi.even_bits_first(e, e.load(I64, block, 66))
        magnitudes = vbmi.columns_of_fours(e, self.name, vbmi.IQ3_S, codes, ninth)
        octets = e.twice(e.load(vector(I8, 32), block, 74))
        return magnitudes, vbmi.sign_columns(e, octets, codes_of_seven=False)

    def odd_scales(self, e: Emitter, block: Value) -> Value:
        nibbles = e.shift_right(e.splat(e.load(I32, block, 106), 8), range(0, 32, 4))
        return e.b.or_(e.shift_left(e.bit_and(nibbles, 15), 1), e.same(nibbles, 1))

    def _raised(self, e: Emitter, block: Value, index: int) -> Value:
        if e.isa == "avx512":
            codes = e.load(vector(I8, 64), block, 2)
            ninth = cb.stored_signs(e, block, 66)
            return vbmi.grid_of_fours(e, self.name, vbmi.IQ3_S, codes, ninth, self.offset)[index]
        low = e.load(vector(I8, 16), block, 2 + 16 * index)
        word = e.b.zext(e.load(I16, block, 66 + 2 * index), I32)
        codes = cb.longer_codes(e, low, word, range(16), 0x100)
        return cb.entries(e, cb.entry_table(e, self.name, 1, self.offset), codes, 32)
