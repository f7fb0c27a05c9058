"""Grid lookups in AVX-512 registers: byte tables by vpermb, bit fields by multishift and GFNI.

A grid has few distinct magnitudes, so an entry is kept as short codes, two bytes in all: the first
byte plane holds the codes of its first half, the second those of the rest.  Codes are chosen so
that each bit of a magnitude is an exclusive-or of code bits: one affine GFNI instruction then picks
a code out of a byte, turns it into the magnitude and raises it by the format's offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.cpu.emitter import I1, I8, I32, I64, Emitter, Value, vector
from ops.cpu.formats import codebook as cb
from ops.quants.codebooks import grid

LOOKUP_ENTRIES = 64
EVEN_BITS = 0x5555555555555555
FIRST_SIGNS = [0x80, 0x40, 0x20, 0x10]
SECOND_SIGNS = [0, 0, 0, 0, *FIRST_SIGNS]
"""Where the bits of a sign byte go for the first and the second code of four weights."""


@dataclass(frozen=True)
class Magnitudes:
    """Codes of magnitudes: magnitude = base ^ (xor of steps[i] where code bit i is set)."""

    base: int
    steps: tuple[int, ...]
    codes: dict[int, int]


def _linear(base: int, steps: Sequence[int], codes: Sequence[int]) -> Magnitudes:
    values = {}
    for code in codes:
        value = base
        for bit, step in enumerate(steps):
            value ^= step if code >> bit & 1 else 0
        values[value] = code
    return Magnitudes(base, tuple(steps), values)


IQ3_S = _linear(1, [2, 4, 8], range(8))
IQ3_XXS = _linear(4, [8, 16, 32, 2], [0, 1, 2, 3, 4, 5, 6, 15])
"""4, 12 ... 52 and, instead of 60, 62: a fourth bit marks it."""


def grid_of_fours(
    e: Emitter, name: str, magnitudes: Magnitudes, codes: Value, ninth: Value | None, offset: int
) -> list[Value]:
    """Four i8x64 in natural order: the raised magnitudes of 64 codes of four weights each.

    codes: i8x64, their low eight bits; ninth: i1x64, the next bit, for grids of 512.
    """
    planes = _code_planes(name, magnitudes)
    columns = [4 * row + column for column in range(4) for row in range(4)]
    if ninth is None:
        codes = _shuffle_words(e, codes, columns)
    first, second = (_lookup(e, plane, codes, ninth) for plane in planes)
    if ninth is not None:
        first, second = (_shuffle_words(e, half, columns) for half in (first, second))
    chunks = []
    for pairs in _interleave(e, first, second):
        low, high = (_affine_codes(e, pairs, magnitudes, shift, offset) for shift in (0, 4))
        chunks += _interleave(e, low, high)
    return chunks


def columns_of_fours(
    e: Emitter, name: str, magnitudes: Magnitudes, codes: Value, ninth: Value | None
) -> list[Value]:
    """i8x64 for each of the four weights of a code: its magnitude for 64 codes, see above."""
    planes = [_lookup(e, plane, codes, ninth) for plane in _code_planes(name, magnitudes)]
    return [_affine_codes(e, plane, magnitudes, shift, 0) for plane in planes for shift in (0, 4)]


def evens_first(e: Emitter, bytes_: Value) -> Value:
    """i8x64: bytes 0, 2 ... 62, then 1, 3 ... 63."""
    return permute(e, bytes_, cb.pinned(e, I8, [*range(0, 64, 2), *range(1, 64, 2)]))


def even_bits_first(e: Emitter, bits: Value) -> Value:
    """i1x64: the bits 0, 2 ... 62 of an i64, then 1, 3 ... 63."""
    even, odd = (
        e.call("llvm.x86.bmi.pext.64", I64, bits, e.i64(mask)) for mask in (EVEN_BITS, ~EVEN_BITS)
    )
    return e.b.bitcast(e.b.or_(even, e.b.shl(odd, e.i64(32))), vector(I1, 64))


def sign_columns(e: Emitter, octets: Value, codes_of_seven: bool) -> list[Value]:
    """i1x64 for each of the four weights of a code: whether it is negative.

    octets: i8x64, sign bytes or 7-bit sign codes of 32 octets of weights, twice: for the first code
    of each octet, then for the second.  The weights' bits are moved to bit 7 of a byte and below.
    """
    second = SECOND_SIGNS
    if codes_of_seven:
        second = [image | SECOND_SIGNS[7] for image in SECOND_SIGNS[:7]]
    matrices = [_matrix(FIRST_SIGNS)] * 4 + [_matrix(second)] * 4
    tops = _affine(e, octets, matrices, 0)
    return [bit_mask(e, tops, bit) for bit in FIRST_SIGNS]


def sign_bytes(e: Emitter, codes: Value) -> Value:
    """Byte vector of 7-bit sign codes -> eight sign bits each: the eighth is their parity."""
    return affine(e, codes, [1 | 128, 2 | 128, 4 | 128, 8 | 128, 16 | 128, 32 | 128, 64 | 128], 0)


def chunk_mask(e: Emitter, bytes_: Value, index: int) -> Value:
    """i1x64: the bits of bytes 8 * index ... of i8x32."""
    return e.b.bitcast(e.extract(e.cast(bytes_, I64), index), vector(I1, 64))


def bit_mask(e: Emitter, bytes_: Value, bit: int) -> Value:
    """i1 vector: whether the bytes have a bit, given by its value."""
    tested = e.b.and_(bytes_, cb.pinned(e, I8, [_signed(bit)] * bytes_.type.count))
    return e.b.icmp_unsigned("!=", tested, e.same(bytes_, 0))


def permute(e: Emitter, bytes_: Value, index: Value) -> Value:
    """i8x64: the bytes that the low six bits of an index choose."""
    return e.call("llvm.x86.avx512.permvar.qi.512", bytes_.type, bytes_, index)


def multishift(e: Emitter, starts: Sequence[int], value: Value) -> Value:
    """Eight bits from bit `starts[i]` of each 64-bit lane, around its end, as its byte i."""
    lanes = value.type.count
    control = cb.pinned(e, I8, list(starts) * (lanes // 8))
    name = f"llvm.x86.avx512.pmultishift.qb.{8 * lanes}"
    return e.call(name, value.type, control, value)


def affine(e: Emitter, value: Value, images: Sequence[int], base: int) -> Value:
    """base ^ (xor of images[i] where bit i of a byte is set), for every byte."""
    return _affine(e, value, [_matrix(images)], base)


def affine_lanes(e: Emitter, value: Value, images: Sequence[Sequence[int]]) -> Value:
    """`affine` without a base; each 128-bit lane of i8x64 has images of its own."""
    return _affine(e, value, [_matrix(lane) for lane in images for _ in (0, 1)], 0)


def nibbles(e: Emitter, bytes_: Value, high_words: Sequence[int]) -> Value:
    """The low nibble of each byte, or the high one in the 64-bit lanes where `high_words` is 1."""
    low, high = _matrix([1, 2, 4, 8]), _matrix([0, 0, 0, 0, 1, 2, 4, 8])
    return _affine(e, bytes_, [high if word else low for word in high_words], 0)


def _affine_codes(e: Emitter, bytes_: Value, m: Magnitudes, shift: int, offset: int) -> Value:
    """The raised magnitudes of the codes from bit `shift` of each byte.

    Adding the offset is an exclusive-or, since it is a power of two above every magnitude.
    """
    return affine(e, bytes_, [0] * shift + list(m.steps), m.base ^ offset)


def _code_planes(name: str, m: Magnitudes) -> list[list[int]]:
    """Two byte planes of a grid's codes, as signed bytes."""
    codes = np.vectorize(m.codes.__getitem__)(grid(name))
    halves: NDArray[np.int64] = codes.reshape(len(codes), 2, -1)
    packed = halves[..., 0] | halves[..., 1] << 4
    return [[_signed(byte) for byte in plane] for plane in packed.T.tolist()]


def _lookup(e: Emitter, table: list[int], index: Value, ninth: Value | None) -> Value:
    """table[index] for i8x64 indices and, in a table of 512, their ninth bits i1x64.

    By vpermb: on Intel vpermi2b takes the time of the two that it replaces, and one more.
    """
    starts = range(LOOKUP_ENTRIES, 256, LOOKUP_ENTRIES)
    reached = [e.b.icmp_unsigned(">=", index, e.same(index, _signed(start))) for start in starts]
    halves = []
    for first in range(0, len(table), 256):
        parts = [
            permute(e, cb.pinned(e, I8, table[start : start + LOOKUP_ENTRIES]), index)
            for start in range(first, first + 256, LOOKUP_ENTRIES)
        ]
        found = parts[0]
        for mask, part in zip(reached, parts[1:], strict=True):
            found = e.select(mask, part, found)
        halves.append(found)
    return halves[0] if ninth is None else e.select(ninth, halves[1], halves[0])


def _shuffle_words(e: Emitter, bytes_: Value, lanes: Sequence[int]) -> Value:
    """Move the 32-bit words of i8x64."""
    return e.cast(e.shuffle(e.cast(bytes_, I32), lanes), I8)


def _interleave(e: Emitter, a: Value, b: Value) -> list[Value]:
    """Bytes of a and b in turn: the low, then the high halves of their 128-bit lanes."""
    return [
        e.shuffle(
            a,
            [
                16 * lane + at + i + 64 * side
                for lane in range(4)
                for i in range(8)
                for side in (0, 1)
            ],
            b,
        )
        for at in (0, 8)
    ]


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _affine(e: Emitter, value: Value, matrices: Sequence[int], base: int) -> Value:
    lanes = value.type.count
    words = cb.pinned(e, I64, list(matrices) * (lanes // 8 // len(matrices)))
    name = f"llvm.x86.vgf2p8affineqb.{8 * lanes}"
    return e.call(name, value.type, value, e.cast(words, I8), I8(_signed(base)))


def _matrix(images: Sequence[int]) -> int:
    """The bit matrix that maps bit i to images[i]; its first row, the last byte, makes bit 0."""
    rows = [sum((image >> row & 1) << bit for bit, image in enumerate(images)) for row in range(8)]
    return int.from_bytes(bytes(reversed(rows)), "little")
