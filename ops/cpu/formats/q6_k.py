"""Q6_K: 6 bits, an int8 scale for each 16 values."""

from __future__ import annotations

from ops.cpu.emitter import I8, I16, Emitter, Value, vector
from ops.cpu.formats.eights import Eights, SixBitEights
from ops.cpu.formats.kernel_format import SubScales, SuperBlock, half_bits


class Q6K(SuperBlock):
    """128 bytes of low nibbles @0, 64 of two high bits @128, 16 scales @192, d f16 @208."""

    name = "Q6_K"
    block_bytes = 210
    offset = 32
    max_byte = 63

    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        """64 bytes of nibbles hold 128 neighbours: low nibbles first; each 32 high bytes serve the
        same 128, two bits for each run of 32."""
        half, upper = divmod(index, 2)
        nibbles = e.cast(e.load(vector(I8, 64), block, 64 * half), I16)
        low = e.bit_and(e.cast(e.shift_right(nibbles, 4) if upper else nibbles, I8), 0x0F)
        tops = e.cast(e.twice(e.load(vector(I8, 32), block, 128 + 32 * half)), I16)
        if upper:
            high = e.shift_right(tops, [0] * 16 + [2] * 16)
        else:
            high = e.shift_left(tops, [4] * 16 + [2] * 16)
        return e.b.or_(low, e.bit_and(e.cast(high, I8), 0x30))

    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        return SubScales(e.widen(e.load(vector(I8, 16), block, 192), I16, signed=True))

    def eights(self, e: Emitter) -> Eights | None:
        return SixBitEights() if e.isa == "avx512" else None

    def scale_bits(self, e: Emitter, block: Value) -> Value:
        return half_bits(e, block, 208)
