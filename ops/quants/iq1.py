"""IQ1_S and IQ1_M: eight weights a code from a grid of -1, 0, 1, shifted by plus or minus 1/8.

The contract's integers are eight times the value, 8 grid + 1 or - 1, and the scale is d/8.
"""

from __future__ import annotations

import numpy as np

from ops.quants.block import F32, I32, Codes, Fields, IntegerFormat, as_f32, bit_fields
from ops.quants.codebooks import grid

_ELEMS = 256


def _unpack_iq1_s(fields: Fields) -> Codes:
    words = fields["qh"]
    index = fields["qs"] | bit_fields(words, 3, 4).reshape(-1, 32) << 8
    minus = np.repeat(words >> 15, 4, axis=1)
    sub_scales = 2 * (words >> 12 & 7).astype(np.int32) + 1
    return Codes(as_f32(fields["d"]) / np.float32(8), _shifted(index, minus), sub_scales)


def _unpack_iq1_m(fields: Fields) -> Codes:
    high = bit_fields(fields["qh"], 4, 2).reshape(-1, 32)
    index = fields["qs"] | (high & 7) << 8
    words = fields["scales"]
    sub_scales = 2 * bit_fields(words, 3, 4).reshape(-1, 16) + 1
    return Codes(_split_half(fields) / np.float32(8), _shifted(index, high >> 3), sub_scales)


def _shifted(index: I32, minus: I32) -> I32:
    """Code and shift sign of each eight weights, [n, 32] each -> i32[n, 256]."""
    shift = 1 - 2 * minus.astype(np.int32)
    return (8 * grid("IQ1_S")[index] + shift[..., None]).reshape(-1, _ELEMS)


def _split_half(fields: Fields) -> F32:
    """The f16 scale whose four nibbles are the tops of the four scale words, lowest first."""
    nibbles = (fields["scales"] >> 12).astype(np.uint16)
    halves = np.bitwise_or.reduce(nibbles << np.array([0, 4, 8, 12], np.uint16), axis=1)
    return as_f32(halves.view(np.float16))


IQ1_S = IntegerFormat(
    name="IQ1_S",
    ggml_type=19,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq1_s,
)
"""d/8 (2s + 1) (8 grid ± 1); a word of `qh`: four 3-bit code tops, 3-bit scale, shift sign."""

IQ1_M = IntegerFormat(
    name="IQ1_M",
    ggml_type=29,
    layout=np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_iq1_m,
)
"""As IQ1_S with a scale per 16 weights and a shift sign per 8; 1.75 bits a weight."""
