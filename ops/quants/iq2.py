"""IQ2_XXS, IQ2_XS and IQ2_S: eight weights a code, magnitudes 8, 25 or 43 from a grid."""

from __future__ import annotations

import numpy as np

from ops.quants.block import I32, Codes, Fields, IntegerFormat, as_f32, bit_fields
from ops.quants.codebooks import SIGN_MASKS, grid, signs

_ELEMS = 256


def _unpack_iq2_xxs(fields: Fields) -> Codes:
    groups = fields["groups"]
    words = groups["scale_signs"]
    sign = signs(SIGN_MASKS[bit_fields(words, 7, 4)])
    codes = _signed(grid("IQ2_XXS")[groups["qs"]], sign)
    return Codes(as_f32(fields["d"]) / np.float32(8), codes, 2 * (words >> 28).astype(np.int32) + 1)


def _unpack_iq2_xs(fields: Fields) -> Codes:
    packed = fields["qs"]
    codes = _signed(grid("IQ2_XS")[packed & 511], signs(SIGN_MASKS[packed >> 9]))
    return Codes(as_f32(fields["d"]) / np.float32(8), codes, _odd_scales(fields))


def _unpack_iq2_s(fields: Fields) -> Codes:
    index = fields["qs"] | bit_fields(fields["qh"], 2, 4).reshape(-1, 32) << 8
    codes = _signed(grid("IQ2_S")[index], signs(fields["signs"]))
    return Codes(as_f32(fields["d"]) / np.float32(8), codes, _odd_scales(fields))


def _odd_scales(fields: Fields) -> I32:
    return 2 * bit_fields(fields["scales"], 4, 2).reshape(-1, 16) + 1


def _signed(magnitudes: I32, sign: I32) -> I32:
    return magnitudes.reshape(-1, _ELEMS) * sign.reshape(-1, _ELEMS)


IQ2_XXS = IntegerFormat(
    name="IQ2_XXS",
    ggml_type=16,
    layout=np.dtype(
        [("d", "<f2"), ("groups", np.dtype([("qs", "u1", 4), ("scale_signs", "<u4")]), 8)]
    ),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq2_xxs,
)
"""d/8 (2s + 1) grid sign; a group is 32 weights: codes, then 7-bit sign codes and the scale."""

IQ2_XS = IntegerFormat(
    name="IQ2_XS",
    ggml_type=17,
    layout=np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq2_xs,
)
"""d/8 (2s + 1) grid sign, 9-bit code and 7-bit sign code a word, 16 weights a scale."""

IQ2_S = IntegerFormat(
    name="IQ2_S",
    ggml_type=22,
    layout=np.dtype(
        [("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]
    ),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq2_s,
)
"""d/8 (2s + 1) grid sign, 10-bit codes, plain signs, 16 weights a scale; 2.5625 bits a weight."""
