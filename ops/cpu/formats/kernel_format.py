"""What the matrix kernels need to know about a weight format.

Every format hands out its weights as bytes in natural element order, 64 at a time, so one kernel
serves all formats of a family and activations are never permuted:

    value[i] = byte[i] - offset          offset: the format's, or the emitter's `signed_bias`

Three families: `SuperBlock` (units of 256 values with integer sub-scales), `SmallBlock` (units of
32 or 16 values, each with one float scale) and `FloatFormat` (no units).  A format is stateless;
its methods emit code at the emitter's position and may be called in any order and again: repeated
loads of the same bytes are merged by the compiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ops.cpu.emitter import I16, Emitter, Value
from ops.cpu.formats.eights import Eights

CHUNK = 64
"""Weights handed out together."""


class UnitFormat(ABC):
    """A format whose dot products are integers within a unit.

    name         as in `ops.quants`
    block_bytes  size of a block
    signed       bytes are value + emitter.signed_bias (any int8 value); otherwise they are
                 value + offset
    max_byte     the largest unsigned byte: at most 129, so that a sum of two products fits 16 bits;
                 up to 64 one of four does, and smaller bytes allow longer sums
    has_mins     units add a second term min_scale * sum(mins * x)
    """

    name: ClassVar[str]
    block_bytes: ClassVar[int]
    signed: ClassVar[bool] = False
    max_byte: ClassVar[int] = 129
    offset: ClassVar[int] = 0
    has_mins: ClassVar[bool] = False
    negative_mins: ClassVar[bool] = False
    """The stored min scale is subtracted (K-quants) rather than added."""

    def byte_offset(self, e: Emitter) -> int:
        """What the bytes exceed the values by."""
        return e.signed_bias if self.signed else self.offset

    def to_scale(self, e: Emitter, bits: Value) -> Value:
        """Vector of stored scales -> f32 vector with the format's constant factor; f16 here."""
        return e.half_to_f32(bits)


@dataclass(frozen=True)
class SubScales:
    """Integers of one 256-value unit, one for each 16 values: i16x16; `mins` may be None."""

    scales: Value
    mins: Value | None = None


class SuperBlock(UnitFormat):
    """A block of 256 values with integer sub-scales: one unit.

    scale_elems  values that share a sub-scale: 16 or 32
    """

    scale_elems: ClassVar[int] = 16

    @abstractmethod
    def chunk(self, e: Emitter, block: Value, index: int) -> Value:
        """i8x64: the bytes of values 64 * index ... of the block at address `block`."""

    @abstractmethod
    def sub_scales(self, e: Emitter, block: Value) -> SubScales:
        """The integer scales (and mins) of the block."""

    @abstractmethod
    def scale_bits(self, e: Emitter, block: Value) -> Value:
        """The stored float scale, an integer scalar that `to_scale` understands."""

    def min_scale_bits(self, e: Emitter, block: Value) -> Value:
        """The stored scale of the mins, i16 (f16 bits); only with `has_mins`."""
        raise NotImplementedError(f"{self.name} has no mins")

    def arrangement(self, e: Emitter) -> Sequence[int] | None:
        """The order of a block's activations that `dots` wants, if the format has that."""
        return None

    def eights(self, e: Emitter) -> Eights | None:
        """How eight blocks are multiplied together, if the format has that."""
        return None

    def dots(self, e: Emitter, block: Value, x: list[Value]) -> list[Value]:
        """What `chunk` and `sub_scales` are for, in one go: i32x16 that sum to each token's total.

        x: addresses of 256 activations each, in the format's arrangement.
        """
        raise NotImplementedError(f"{self.name} has no arrangement")


class SmallBlock(UnitFormat):
    """Units of 32 (or 16) values with a float scale each.

    A block begins with its scale; where it is one unit with a min, that follows at byte 2.

    `row` is the address of a row, `unit` a unit's number in it (i64).  A chunk holds 64 /
    unit_elems units; those beyond `last_unit` must not be read, and what they hold does not matter.
    """

    unit_elems: ClassVar[int] = 32
    units_per_block: ClassVar[int] = 1

    @abstractmethod
    def chunk(self, e: Emitter, row: Value, unit: Value, last_unit: Value) -> Value:
        """i8x64: the bytes of the units from `unit`, a multiple of 64 / unit_elems."""

    @abstractmethod
    def scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        """The stored float scale of a unit, an integer scalar that `to_scale` understands."""

    def whole_block_scales(self, e: Emitter, row: Value, unit: Value, count: int) -> Value:
        """The stored scales of `count` units, whole blocks of several units from `unit` on."""
        firsts = range(0, count, self.units_per_block)
        each = [self.scale_bits(e, row, e.add(unit, first)) for first in firsts]
        return e.shuffle(e.vector_of(each), [i // self.units_per_block for i in range(count)])

    def min_scale_bits(self, e: Emitter, row: Value, unit: Value) -> Value:
        """The stored min of a unit, i16 (f16 bits); only with `has_mins`."""
        raise NotImplementedError(f"{self.name} has no mins")

    def block(self, e: Emitter, row: Value, unit: Value) -> Value:
        """The address of the block that holds a unit; `units_per_block` is a power of two."""
        shift = self.units_per_block.bit_length() - 1
        index = e.b.lshr(unit, e.i64(shift)) if shift else unit
        return e.add(row, e.mul(index, self.block_bytes))


class FloatFormat(ABC):
    """A format that stores one number after the other."""

    name: ClassVar[str]
    elem_bytes: ClassVar[int]

    @abstractmethod
    def values(self, e: Emitter, address: Value, lanes: int) -> Value:
        """f32xlanes from `address`."""


KernelFormat = SuperBlock | SmallBlock | FloatFormat


def half_bits(e: Emitter, address: Value, offset: int = 0) -> Value:
    """The i16 at address + offset."""
    return e.load(I16, address, offset)
