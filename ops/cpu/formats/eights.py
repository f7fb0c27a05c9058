"""Q4_K, Q5_K and Q6_K eight blocks at a time, in AVX-512; see `ops.cpu.gemv_eights`.

The headers of eight blocks are taken apart together, and whatever depends on the activations alone
is made once for all rows. A processor with two threads a core is bound by its vector instructions
here, and this takes about two thirds of what one block after the other takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ops.cpu.emitter import I8, I16, I32, I64, Emitter, Value, vector
from ops.cpu.formats.codebook_vbmi import affine, affine_lanes

UNIT = 256
PIECE = 16
"""Bytes that stay together when activations are put in order: a lane of 128 bits."""


@dataclass(frozen=True)
class Heads:
    """Of eight blocks. scales, min_scales  f32x8; mins  i16x32 of blocks 0 to 3, and of 4 to 7:
    eight of each."""

    scales: Value
    min_scales: Value | None = None
    mins: Sequence[Value] = ()


class Eights(ABC):
    """extra_bytes  of what `prepare` makes for a unit's activations, beside putting them in order
    codes_bytes  of what `heads` keeps of a block for `totals`
    copies       whether activations are put in an order of the format's own
    """

    extra_bytes: ClassVar[int]
    codes_bytes: ClassVar[int] = 0
    copies: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, e: Emitter, x: Value, sums: Value, target: Value, extra: Value) -> None:
        """From a unit's activations and their sums of 16: what the other two want."""

    @abstractmethod
    def heads(self, e: Emitter, blocks: Sequence[Value], codes: Value) -> Heads:
        """The headers of the blocks at eight addresses; their sub-scales go to `codes`."""

    @abstractmethod
    def totals(
        self, e: Emitter, block: Value, codes: Value, x: Sequence[Value], extras: Sequence[Value]
    ) -> list[Value]:
        """i32x16 that sum to a block's total, for each token's unit."""


class NibbleEights(Eights):
    """Q4_K, and Q5_K with its fifth bits: 6-bit scales and mins of eight groups of 32 values.

    A vector holds sixteen values of each second group, from either nibble of 64 bytes, so that the
    sums of eight products of a group still fit 16 bits and are scaled together.
    """

    extra_bytes = 16
    codes_bytes = 16
    copies = True

    def __init__(self, nibbles_at: int, fifth_bits_at: int | None = None) -> None:
        self.nibbles_at, self.fifth_bits_at = nibbles_at, fifth_bits_at

    def prepare(self, e: Emitter, x: Value, sums: Value, target: Value, extra: Value) -> None:
        """Lanes of 128 bits, four by four, rows and columns exchanged; sums of 32."""
        for row in range(4):
            for column in range(4):
                piece = e.load(vector(I8, PIECE), x, PIECE * (4 * row + column))
                e.store(piece, target, PIECE * (4 * column + row))
        halves = e.load(vector(I16, 16), sums)
        e.store(e.b.trunc(e.madd_words(halves, e.same(halves, 1)), vector(I16, 8)), extra)

    def heads(self, e: Emitter, blocks: Sequence[Value], codes: Value) -> Heads:
        words = [
            e.concat(*(e.load(vector(I32, 4), block) for block in blocks[first : first + 4]))
            for first in (0, 4)
        ]
        both = e.shuffle(words[0], range(0, 32, 4), words[1])
        scales = e.half_to_f32(e.cast(both, I16))
        unpacked = [self._codes(e, four) for four in words]
        for at, four in enumerate(unpacked):
            e.store(four, codes, 64 * at)
        low, high = (e.cast(four, I64) for four in unpacked)
        mins = e.cast(e.shuffle(low, [1, 9, 3, 11, 5, 13, 7, 15], high), I8)
        return Heads(
            e.shuffle(scales, range(0, 16, 2)),
            e.shuffle(scales, range(1, 16, 2)),
            [self._spread(e, mins, first) for first in (0, 8)],
        )

    def totals(
        self, e: Emitter, block: Value, codes: Value, x: Sequence[Value], extras: Sequence[Value]
    ) -> list[Value]:
        raw = [e.cast(e.load(vector(I8, 64), block, self.nibbles_at + at), I64) for at in (0, 64)]
        weights = []
        for half in (0, 1):
            lanes = [2 * half, 2 * half + 1, 4 + 2 * half, 5 + 2 * half]
            bytes_ = e.cast(e.shuffle(raw[0], [*lanes, *(8 + i for i in lanes)], raw[1]), I8)
            weights.append(e.bit_and(bytes_, 0x0F))
            weights.append(affine(e, bytes_, [0, 0, 0, 0, 1, 2, 4, 8], 0))
        if self.fifth_bits_at is not None:
            for i, half in enumerate((0, 0, 1, 1)):
                bits = e.load(vector(I8, PIECE), block, self.fifth_bits_at + PIECE * half)
                images = [[16 * (bit == 2 * lane + i % 2) for bit in range(8)] for lane in range(4)]
                fifth = affine_lanes(e, e.concat(*[bits] * 4), images)
                weights[i] = e.b.or_(weights[i], fifth)
        low_a, high_a, low_b, high_b = weights
        four = e.concat(*[e.load(vector(I8, PIECE), codes)] * 4)
        order = [b for i in range(8) for b in 4 * (PIECE * (i // 2) + i, 64)]
        scales = e.cast(e.shuffle(four, order, e.zeros(I8, 64)), I16)
        return [self._total(e, ((low_a, low_b), (high_a, high_b)), scales, at) for at in x]

    @staticmethod
    def _total(e: Emitter, weights: Sequence[Sequence[Value]], scales: Value, x: Value) -> Value:
        dots = []
        for side, (first, second) in enumerate(weights):
            values = [e.load(vector(I8, 64), x, 128 * side + at) for at in (0, 64)]
            dot = e.dot_unsigned(e.zeros(I32, 16), first, values[0])
            dots.append(e.dot_unsigned(dot, second, values[1]))
        return e.madd_words(e.pack_words(*dots), scales)

    @staticmethod
    def _codes(e: Emitter, words: Value) -> Value:
        """The headers of four blocks, a lane each -> eight scales, then eight mins, as bytes.

        See `ops.cpu.formats.q4_k`.
        """
        whole = e.shuffle(words, [4 * lane + i for lane in range(4) for i in (1, 3, 2, 3)])
        low = e.b.and_(
            e.shift_right(whole, [0, 0, 0, 4] * 4),
            e.constant(I32, [0x3F3F3F3F, 0x0F0F0F0F] * 8),
        )
        tops = e.shuffle(words, [4 * lane + i for lane in range(4) for i in (1, 1, 2, 2)])
        high = e.b.and_(e.shift_right(tops, 2), e.constant(I32, [0, 0x30303030] * 8))
        return e.cast(e.b.or_(low, high), I8)

    @staticmethod
    def _spread(e: Emitter, mins: Value, first: int) -> Value:
        """Eight bytes of each lane as words."""
        lanes = [
            16 * lane + first + i // 2 if i % 2 == 0 else 64 for lane in range(4) for i in range(16)
        ]
        return e.cast(e.shuffle(mins, lanes, e.zeros(I8, 64)), I16)


class SixBitEights(Eights):
    """Q6_K. What its offset of 32 takes from a unit is added in two halves: sums of 16 values,
    multiplied by 16, fit 16 bits."""

    extra_bytes = 32

    def prepare(self, e: Emitter, x: Value, sums: Value, target: Value, extra: Value) -> None:
        halves = e.load(vector(I16, 16), sums)
        e.store(e.b.mul(halves, e.same(halves, -16)), extra)

    def heads(self, e: Emitter, blocks: Sequence[Value], codes: Value) -> Heads:
        return Heads(e.half_to_f32(e.vector_of([e.load(I16, block, 208) for block in blocks])))

    def totals(
        self, e: Emitter, block: Value, codes: Value, x: Sequence[Value], extras: Sequence[Value]
    ) -> list[Value]:
        scales = e.widen(e.load(vector(I8, 16), block, 192), I16, signed=True)
        totals = []
        for extra in extras:
            half = e.load(vector(I16, 16), extra)
            offsets = e.dot_words(e.madd_words(scales, half), scales, half)
            totals.append(e.concat(offsets, e.zeros(I32, 8)))
        for half in (0, 1):
            weights = self._weights(e, block, half)
            order = [8 * half + 4 * i + lane for lane in range(4) for i in (0, 1) for _ in range(4)]
            factors = e.shuffle(scales, order)
            for t, address in enumerate(x):
                dots = []
                for i in (0, 1):
                    at = 128 * half + 64 * i
                    values = e.load(vector(I8, 64), address, at)
                    dots.append(e.dot_unsigned(e.zeros(I32, 16), weights[i], values))
                totals[t] = e.dot_words(totals[t], e.pack_words(*dots), factors)
        return totals

    @staticmethod
    def _weights(e: Emitter, block: Value, half: int) -> list[Value]:
        """Values 128 * half to 64 behind them, and the next 64: four bits, two above them."""
        nibbles = e.load(vector(I8, 64), block, 64 * half)
        tops = e.twice(e.load(vector(I8, 32), block, 128 + 32 * half))
        low = e.bit_and(nibbles, 0x0F)
        high = affine(e, nibbles, [0, 0, 0, 0, 1, 2, 4, 8], 0)
        images = [
            [16 * (bit == first) + 32 * (bit == first + 1) for bit in range(8)]
            for first in (0, 2, 4, 6)
        ]
        return [
            e.b.or_(low, affine_lanes(e, tops, [images[0], images[0], images[1], images[1]])),
            e.b.or_(high, affine_lanes(e, tops, [images[2], images[2], images[3], images[3]])),
        ]
