"""IQ4_NL and IQ4_XS: 4-bit codes into one table of sixteen uneven steps."""

from __future__ import annotations

import numpy as np

from ops.quants.block import Codes, Fields, IntegerFormat, as_f32, bit_fields, bit_planes
from ops.quants.codebooks import IQ4_VALUES


def _unpack_iq4_nl(fields: Fields) -> Codes:
    codes = IQ4_VALUES[bit_planes(fields["qs"], 4)].reshape(-1, 32)
    return Codes(as_f32(fields["d"]), codes)


def _unpack_iq4_xs(fields: Fields) -> Codes:
    low = bit_fields(fields["scales_l"], 4, 2).reshape(-1, 8)
    high = bit_fields(fields["scales_h"], 2, 8)
    codes = IQ4_VALUES[bit_planes(fields["qs"].reshape(-1, 8, 16), 4)].reshape(-1, 256)
    return Codes(as_f32(fields["d"]), codes, (low | high << 4) - 32)


IQ4_NL = IntegerFormat(
    name="IQ4_NL",
    ggml_type=20,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    block_elems=32,
    activation="q8_32",
    unpack=_unpack_iq4_nl,
)
"""d table[q]; 4.5 bits a weight."""

IQ4_XS = IntegerFormat(
    name="IQ4_XS",
    ggml_type=23,
    layout=np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)]),
    block_elems=256,
    activation="q8_256",
    unpack=_unpack_iq4_xs,
)
"""d (s - 32) table[q], 32 values a sub-block; 4.25 bits a weight."""
