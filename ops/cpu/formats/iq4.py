"""IQ4_NL and IQ4_XS: nibbles into a table of sixteen uneven steps."""

from __future__ import annotations

from ops.cpu.emitter import I8, I16, I32, I64, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.cpu.formats import codebook_vbmi as vbmi
from ops.cpu.formats.kernel_format import SmallBlock, SubScales, SuperBlock, half_bits
from ops.quants.codebooks import IQ4_VALUES

RUN = 16
"""Bytes whose low nibbles, then high nibbles, are neighbours."""


def nibble_runs(e: Emitter, packed: Value) -> Value:
    """i8x32, two runs -> 64 nibbles in natural order."""
    runs = e.shuffle(packed, [*range(RUN), *range(RUN), *range(RUN, 32), *range(RUN, 32)])
    if e.isa == "avx512":
        return vbmi.nibbles(e, runs, (0, 0, 1, 1))
    words = e.shift_right(e.cast(runs, I16), ([0] * 8 + [4] * 8) * 2)
    return e.bit_and(e.cast(words, I8), 0x0F)


def signed_table(e: Emitter, values: list[int]) -> list[int]:
    """Table values raised by the emitter's bias, as signed bytes."""
    return [(value + e.signed_bias + 128) % 256 - 128 for value in values]


class IQ4XS(SuperBlock):
    """d f16 @0, high scale bits u16 @2, low scale nibbles @4, eight runs of 16 bytes @8."""

    name = "IQ4_XS"
    block_bytes = 136
    scale_elems = 32
    signed = True

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        nibbles = nibble_runs(e, e.load(vector(I8, 32), block, 8 + 32 * index))
        return e.lookup16(signed_table(e, IQ4_VALUES.tolist()), nibbles)

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        head = e.load(I64, block)
        high = e.splat(e.b.trunc(e.b.lshr(head, e.i64(16)), I32), 8)
        low = e.splat(e.b.trunc(e.b.lshr(head, e.i64(32)), I32), 8)
        four = e.bit_and(e.shift_right(low, range(0, 32, 4)), 15)
        two = e.bit_and(e.shift_right(high, range(0, 16, 2)), 3)
        six = e.b.or_(four, e.shift_left(two, 4))
        return SubScales(cb.each_twice(e, e.b.sub(six, e.same(six, 32))))

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block)


class IQ4NL(SmallBlock):
    """d f16 @0, one run of 16 bytes @2."""

    name = "IQ4_NL"
    block_bytes = 18
    signed = True

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        packed = two_runs(e, self, row, unit, last_unit, 2)
        return e.lookup16(signed_table(e, IQ4_VALUES.tolist()), nibble_runs(e, packed))

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return half_bits(e, self.block(e, row, unit))


def two_runs(
    e: Emitter, fmt: SmallBlock, row: Value, unit: Value, last_unit: Value, offset: int
) -> Value:
    """The 16 bytes at `offset` of a block and of the next one, or of the same at the row's end."""
    second = e.minimum(e.add(unit, 1), last_unit)
    runs = [e.load(vector(I8, RUN), fmt.block(e, row, at), offset) for at in (unit, second)]
    return e.concat(*runs)
