"""IQ3_XXS and IQ3_S: four weights a code, magnitudes from a grid, signs beside it."""

from __future__ import annotations

import numpy as np

from ops.quants.block import I32, Codes, Fields, IntegerFormat, as_f32, bit_fields
from ops.quants.codebooks import SIGN_MASKS, grid, signs

_ELEMS = 256


def _unpack_iq3_xxs(fields: Fields) -> Codes:
    words = fields["scales_signs"]
    sign_codes = bit_fields(words, 7, 4)
    codes = _signed(grid("IQ3_XXS")[fields["qs"]], signs(SIGN_MASKS[sign_codes]))
    return Codes(as_f32(fields["d"]) / np.float32(4), codes, 2 * (words >> 28).astype(np.int32) + 1)


def _unpack_iq3_s(fields: Fields) -> Codes:
    ninth_bits = bit_fields(fields["qh"], 1, 8).reshape(-1, 64)
    index = fields["qs"] | ninth_bits << 8
    codes = _signed(grid("IQ3_S")[index], signs(fields["signs"]))
    return Codes(
        as_f32(fields["d"]), codes, 2 * bit_fields(fields["scales"], 4, 2).reshape(-1, 8) + 1
    )


def _signed(magnitudes: I32, sign: I32) -> I32:
    return magnitudes.reshape(-1, _ELEMS) * sign.reshape(-1, _ELEMS)


IQ3_XXS = IntegerFormat(
    name="IQ3_XXS",
    ggml_type=18,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 64), ("scales_signs", "<u4", 8)]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq3_xxs,
)
"""d/4 (2s + 1) grid sign; each word of 32 weights: four 7-bit sign codes, 4-bit scale on top."""

IQ3_S = IntegerFormat(
    name="IQ3_S",
    ggml_type=21,
    layout=np.dtype(
        [("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]
    ),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq3_s,
)
"""d (2s + 1) grid sign, 9-bit codes, 32 weights a scale; 3.4375 bits a weight."""
