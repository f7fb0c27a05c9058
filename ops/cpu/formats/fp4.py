"""MXFP4 and NVFP4: nibbles that are 4-bit floating-point numbers, doubled to integers."""

from __future__ import annotations

from ops.cpu.emitter import F32, I8, I32, Emitter, Value, vector
from ops.cpu.formats.iq4 import nibble_runs, two_runs
from ops.cpu.formats.kernel_format import SmallBlock
from ops.quants.codebooks import FP4_VALUES

OFFSET = 12
TABLE = [int(value) + OFFSET for value in FP4_VALUES]
"""Twice the number that each code stands for, raised to be unsigned."""


class MXFP4(SmallBlock):
    """Exponent e @0, one run of 16 bytes @1; 2^(e - 128) times the doubled number."""

    name = "MXFP4"
    block_bytes = 17
    offset = OFFSET
    max_byte = 2 * OFFSET

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        return e.lookup16(TABLE, nibble_runs(e, two_runs(e, self, row, unit, last_unit, 1)))

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        return e.load(I8, self.block(e, row, unit))

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        """2^(e - 128): the exponent field is e - 1; e = 0 and 1 are subnormal."""
        exponent = e.bit_and(e.widen(bits, I32, signed=False), 0xFF)
        normal = e.shift_left(e.b.sub(exponent, e.same(exponent, 1)), 23)
        subnormal = e.b.shl(e.same(exponent, 1 << 21), exponent)
        is_normal = e.b.icmp_unsigned(">=", exponent, e.same(exponent, 2))
        return e.cast(e.select(is_normal, normal, subnormal), F32)


class NVFP4(SmallBlock):
    """Four UE4M3 scales @0, then four runs of eight bytes @4, 16 weights each."""

    name = "NVFP4"
    block_bytes = 36
    unit_elems = 16
    units_per_block = 4
    offset = OFFSET
    max_byte = 2 * OFFSET

    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        packed = e.load(vector(I8, 32), self.block(e, row, unit), 4)
        lanes = [8 * (weight // 16) + weight % 8 for weight in range(64)]
        runs = e.shuffle(packed, lanes)
        words = e.shift_right(e.cast(runs, I32), [0, 0, 4, 4] * 4)
        return e.lookup16(TABLE, e.bit_and(e.cast(words, I8), 0x0F))

    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        within = e.b.and_(unit, e.i64(3))
        return e.load(I8, e.add(self.block(e, row, unit), within))

    def whole_block_scales(self, e: Emitter, row: Value, unit: Value, count: int) -> Value:
        firsts = range(0, count, self.units_per_block)
        words = [e.load(I32, self.block(e, row, e.add(unit, first))) for first in firsts]
        return e.cast(e.vector_of(words), I8)

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        """Half the UE4M3 number; its 7 bits moved to an f32's exponent are 2^120 too small.

        Subnormal numbers become subnormal f32, which the product makes exact; 0x7f counts as zero.
        """
        byte = e.bit_and(e.widen(bits, I32, signed=False), 0xFF)
        code = e.bit_and(byte, 0x7F)
        tiny = e.cast(e.shift_left(code, 20), F32)
        value = e.b.fmul(tiny, e.splat(e.f32(2.0**119), code.type.count))
        is_nan = e.b.icmp_unsigned(
            "==", e.bit_and(e.widen(bits, I32, False), 0xFF), e.same(code, 0x7F)
        )
        return e.select(is_nan, e.zeros(F32, code.type.count), value)
