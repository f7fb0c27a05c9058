"""The constant tables of the IQ and FP4 formats.

The large grids are taken from the gguf package when a format first needs them; this is the only
module that imports it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.quants.block import I32, U8

GRIDS = ("IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS")
"""Formats that own a grid; IQ1_M shares the one of IQ1_S."""


def _constant(values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    table = np.array(values, dtype)
    table.flags.writeable = False
    return table


IQ4_VALUES: I32 = _constant(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32
)
"""The values of IQ4_NL and IQ4_XS codes."""

FP4_VALUES: I32 = _constant([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)
"""Twice the E2M1 value of each code: the halves become integers."""

SIGN_MASKS: U8 = _constant([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)
"""Eight sign bits of each 7-bit sign code; the eighth makes their number even."""


@cache
def grid(name: str) -> I32:
    """The grid of a format: i32[n_entries, 4 or 8], read-only."""
    from gguf import quants

    codebook = getattr(quants, name)
    codebook.init_grid()
    return _constant(codebook.grid.reshape(codebook.grid_shape), np.int32)


def signs(masks: NDArray[Any]) -> I32:
    """Bit i set means value i is negative: u8[...] -> +1 or -1, i32[..., 8]."""
    bits = (masks[..., None].astype(np.int32) >> np.arange(8, dtype=np.int32)) & 1
    return 1 - 2 * bits
