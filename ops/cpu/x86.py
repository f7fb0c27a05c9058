"""The emitter's operations in x86 instructions: AVX2, AVX-VNNI and AVX-512."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ops.cpu.emitter import F16, F32, I16, I32, Emitter, Value, vector
from ops.cpu.isa import Isa

INSTRUCTIONS = {
    "pmaddubsw": {
        128: "ssse3.pmadd.ub.sw.128",
        256: "avx2.pmadd.ub.sw",
        512: "avx512.pmaddubs.w.512",
    },
    "pmaddwd": {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"},
    "pshufb": {128: "ssse3.pshuf.b.128", 256: "avx2.pshuf.b", 512: "avx512.pshuf.b.512"},
    "packssdw": {128: "sse2.packssdw.128", 256: "avx2.packssdw", 512: "avx512.packssdw.512"},
    "psignb": {128: "ssse3.psign.b.128", 256: "avx2.psign.b"},
    "vpdpbusd": {bits: f"avx512.vpdpbusd.{bits}" for bits in (128, 256, 512)},
    "vpdpwssd": {bits: f"avx512.vpdpwssd.{bits}" for bits in (128, 256, 512)},
}
"""LLVM's names of the instructions used, by the bits of the first operand."""


def emitter_for(isa: Isa, builder: Any) -> Emitter:
    """The emitter of an instruction set, at a builder's position."""
    return _EMITTERS[isa](builder)


class Avx2Emitter(Emitter):
    """256-bit registers; 64-byte vectors are handled as two."""

    isa = "avx2"
    register_bits = 256

    def half_to_f32(self, bits: Value) -> Value:
        return self.b.fpext(self.cast(bits, F16), vector(F32, bits.type.count))

    def pair_dots(self, weights: Value, x: Value) -> Value:
        return self._split(self._pair_dots, weights, x)

    def dot_signed(self, total: Value, weights: Value, x: Value) -> Value:
        return self.add_pairs(total, self._split(self._signed_pair_dots, weights, x))

    def madd_words(self, a: Value, b: Value) -> Value:
        return self._split(self._madd_words, a, b)

    def lookup16(self, table: Sequence[int], index: Value) -> Value:
        lanes = index.type.count // 16
        return self.shuffle_bytes(self.constant(index.type.element, list(table) * lanes), index)

    def shuffle_bytes(self, value: Value, index: Value) -> Value:
        """pshufb: bytes of each 128-bit lane by the low four bits of the index, 0 if negative."""
        return self._split(self._shuffle_bytes, value, index)

    def _pair_dots(self, weights: Value, x: Value) -> Value:
        return self._x86("pmaddubsw", vector(I16, weights.type.count // 2), weights, x)

    def _signed_pair_dots(self, weights: Value, x: Value) -> Value:
        """|w| * (x with the sign of w): no sum of two exceeds 128 * 127 * 2, so none saturates."""
        magnitude = self._x86("psignb", weights.type, weights, weights)
        return self._pair_dots(magnitude, self._x86("psignb", x.type, x, weights))

    def _madd_words(self, a: Value, b: Value) -> Value:
        return self._x86("pmaddwd", vector(I32, a.type.count // 2), a, b)

    def _shuffle_bytes(self, value: Value, index: Value) -> Value:
        return self._x86("pshufb", value.type, value, index)

    def _x86(self, instruction: str, result: Any, *args: Value) -> Value:
        bits = args[0].type.count * args[0].type.element.width
        return self.call(f"llvm.x86.{INSTRUCTIONS[instruction][bits]}", result, *args)

    def _split(self, operation: Callable[..., Value], *values: Value) -> Value:
        """Apply an operation register by register."""
        last = values[-1].type
        if last.count * last.element.width <= self.register_bits:
            return operation(*values)
        low, high = zip(*(self.halves(value) for value in values), strict=True)
        return self.concat(self._split(operation, *low), self._split(operation, *high))


class AvxVnniEmitter(Avx2Emitter):
    """AVX2 with the four-product dot instruction.

    Its operands are passed as i32 vectors as in older LLVM; newer ones read that form too.
    """

    isa = "avxvnni"
    signed_bias = 128
    packs_dots = True

    def dot_unsigned(self, total: Value, weights: Value, x: Value) -> Value:
        return self._split(self._dot_bytes, total, self.cast(weights, I32), self.cast(x, I32))

    def dot_signed(self, total: Value, weights: Value, x: Value) -> Value:
        return self.dot_unsigned(total, weights, x)

    def dot_words(self, total: Value, a: Value, b: Value) -> Value:
        return self._split(self._dot_words, total, self.cast(a, I32), self.cast(b, I32))

    def pack_words(self, a: Value, b: Value) -> Value:
        return self._split(self._pack_words, a, b)

    def _pack_words(self, a: Value, b: Value) -> Value:
        return self._x86("packssdw", vector(I16, 2 * a.type.count), a, b)

    def _dot_bytes(self, total: Value, weights: Value, x: Value) -> Value:
        return self._x86("vpdpbusd", total.type, total, weights, x)

    def _dot_words(self, total: Value, a: Value, b: Value) -> Value:
        return self._x86("vpdpwssd", total.type, total, a, b)


class Avx512Emitter(AvxVnniEmitter):
    """512-bit registers with VNNI, VBMI and GFNI."""

    isa = "avx512"
    register_bits = 512
    accumulator_lanes = 16
    gemm_tokens = 5
    tile_tokens = 8


_EMITTERS: dict[Isa, type[Emitter]] = {
    "avx512": Avx512Emitter,
    "avxvnni": AvxVnniEmitter,
    "avx2": Avx2Emitter,
    "portable": Emitter,
}
