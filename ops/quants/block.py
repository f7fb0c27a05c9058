"""What a block format is: its bytes, the numbers in them, and their exact integer decomposition.

A format is one `unpack` function that turns the fields of a block into `Codes`; the values
(`dequantize`) and the integers of the arithmetic contract (`units`) both follow from it, so the two
cannot disagree.  No dot product lives here: `ops.arithmetic` defines it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Fields = NDArray[np.void]
"""Blocks seen through their layout: a structured array of shape [n_blocks]."""

ActivationKind = Literal["q8_256", "q8_32", "f32"]
"""How the other operand of a dot product is stored: int8 with one scale per 256 or 32, or f32."""

ACTIVATION_GROUP: dict[ActivationKind, int] = {"q8_256": 256, "q8_32": 32, "f32": 1}
"""Values that share one activation scale."""

SUM_ELEMS = 16
"""Values under one activation sum, and so under one integer min."""


@dataclass(frozen=True)
class Codes:
    """The numbers in n blocks: value[i] = scale * sub_scales[i / S] * codes[i] (+ min).

    scale       f32[n] or f32[n, units]: the scale with the format's constant factor
    codes       i32[n, block_elems], signed
    sub_scales  i32[n, S], S dividing block_elems; None means 1
    min_scale   f32[n], added as min_scale * mins; None where the format has no mins
    mins        i32[n, M], M dividing block_elems
    """

    scale: F32
    codes: I32
    sub_scales: I32 | None = None
    min_scale: F32 | None = None
    mins: I32 | None = None


@dataclass(frozen=True)
class Units:
    """Exact integers of n blocks, U units each: value = scale * weights + min_scale * mins.

    scale f32[n, U]; weights i32[n, U, E], sub-scales multiplied in; min_scale f32[n, U] and
    mins i32[n, U, E / 16], both None where the format has no mins.
    """

    scale: F32
    weights: I32
    min_scale: F32 | None = None
    mins: I32 | None = None


@dataclass(frozen=True, kw_only=True)
class BlockFormat(ABC):
    """A weight format of GGUF files.

    name         as GGUF tools spell it, "Q4_K"
    ggml_type    its number in the file
    layout       the packed fields of one block
    block_elems  weights in a block
    activation   how the vector that meets these weights is stored
    has_mins     whether a unit adds a second, min, term
    """

    name: str
    ggml_type: int
    layout: np.dtype[Any]
    block_elems: int
    activation: ActivationKind
    has_mins: bool = False

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize

    @property
    @abstractmethod
    def unit_elems(self) -> int:
        """Weights whose dot product is one exact integer."""

    @property
    def units_per_block(self) -> int:
        return self.block_elems // self.unit_elems

    def row_bytes(self, n_elems: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: `n_elems` is not a whole number of blocks.
        """
        n_blocks, rest = divmod(n_elems, self.block_elems)
        if rest:
            raise ValueError(
                f"a {self.name} row of {n_elems} values is not a whole number of "
                f"{self.block_elems}-value blocks"
            )
        return n_blocks * self.block_bytes

    @abstractmethod
    def dequantize(self, blocks: U8) -> F32:
        """u8[n, block_bytes] -> f32[n, block_elems]."""

    @abstractmethod
    def units(self, blocks: U8) -> Units:
        """u8[n, block_bytes] -> the integers behind `dequantize`.

        Raises:
            TypeError: the format stores floating-point numbers.
        """

    def dequantize_rows(self, rows: U8) -> F32:
        """u8[..., row_bytes] -> f32[..., n_elems]."""
        blocks = np.ascontiguousarray(rows).reshape(-1, self.block_bytes)
        return self.dequantize(blocks).reshape(*rows.shape[:-1], -1)

    def _fields(self, blocks: U8) -> Fields:
        return np.ascontiguousarray(blocks).view(self.layout)[:, 0]


@dataclass(frozen=True, kw_only=True)
class IntegerFormat(BlockFormat):
    """A format whose values are integers times scales.

    unpack       fields of n blocks -> Codes
    scale_elems  weights under one float scale; None: the whole block
    """

    unpack: Callable[[Fields], Codes]
    scale_elems: int | None = None

    @property
    def unit_elems(self) -> int:
        return min(self.scale_elems or self.block_elems, ACTIVATION_GROUP[self.activation])

    def dequantize(self, blocks: U8) -> F32:
        c = self.unpack(self._fields(blocks))
        n = len(blocks)
        scale = _spread(c.scale.reshape(n, -1), self.block_elems)
        if c.sub_scales is not None:
            scale = scale * _spread(c.sub_scales, self.block_elems).astype(np.float32)
        values: F32 = scale * c.codes.astype(np.float32)
        if c.min_scale is not None and c.mins is not None:
            mins = c.min_scale[:, None] * c.mins.astype(np.float32)
            values = values + _spread(mins, self.block_elems)
        return values

    def units(self, blocks: U8) -> Units:
        c = self.unpack(self._fields(blocks))
        n, n_units = len(blocks), self.units_per_block
        weights = c.codes
        if c.sub_scales is not None:
            weights = weights * _spread(c.sub_scales, self.block_elems)
        weights = weights.reshape(n, n_units, self.unit_elems)
        scale = _spread(c.scale.reshape(n, -1), n_units)
        if c.min_scale is None or c.mins is None:
            return Units(scale, weights)
        mins = _spread(c.mins, self.block_elems // SUM_ELEMS).reshape(n, n_units, -1)
        return Units(scale, weights, _spread(c.min_scale[:, None], n_units), mins)


@dataclass(frozen=True, kw_only=True)
class FloatFormat(BlockFormat):
    """A format that stores floating-point numbers, one a block.

    to_f32  the stored numbers -> f32, exact except where the docstring of the format says otherwise
    """

    to_f32: Callable[[NDArray[Any]], F32]

    @property
    def unit_elems(self) -> int:
        return 1

    def dequantize(self, blocks: U8) -> F32:
        return self.to_f32(np.ascontiguousarray(blocks).view(self.layout))

    def units(self, blocks: U8) -> Units:
        raise TypeError(f"{self.name} stores floating-point numbers: it has no integer units")


def bit_fields(words: NDArray[Any], width: int, count: int) -> I32:
    """The `count` lowest fields of `width` bits of each word: [...] -> i32[..., count]."""
    shifts = width * np.arange(count, dtype=np.int64)
    fields = (words[..., None].astype(np.int64) >> shifts) & ((1 << width) - 1)
    return fields.astype(np.int32)


def bit_planes(bytes_: U8, width: int) -> I32:
    """Fields of equal position side by side: u8[..., k] -> i32[..., 8 / width, k]."""
    return bit_fields(bytes_, width, 8 // width).swapaxes(-1, -2)


def as_f32(halves: NDArray[Any]) -> F32:
    """f16 -> f32, exact."""
    return halves.astype(np.float32)


def _spread(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Repeat each entry of the last axis so that it has `length` entries."""
    if values.shape[-1] == length:
        return values
    return np.repeat(values, length // values.shape[-1], axis=-1)
