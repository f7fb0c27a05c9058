"""Q1_0 and Q2_0: one or two bits a weight, in order, under one scale."""

from __future__ import annotations

import numpy as np

from ops.quants.block import Codes, Fields, IntegerFormat, as_f32, bit_fields


def _unpack_q1_0(fields: Fields) -> Codes:
    return Codes(as_f32(fields["d"]), 2 * bit_fields(fields["qs"], 1, 8).reshape(-1, 128) - 1)


def _unpack_q2_0(fields: Fields) -> Codes:
    return Codes(as_f32(fields["d"]), bit_fields(fields["qs"], 2, 4).reshape(-1, 64) - 1)


Q1_0 = IntegerFormat(
    name="Q1_0",
    ggml_type=41,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    block_elems=128,
    activation="q8_32",
    unpack=_unpack_q1_0,
)
"""d where the bit is set, -d where not; 1.125 bits a weight."""

Q2_0 = IntegerFormat(
    name="Q2_0",
    ggml_type=42,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    block_elems=64,
    activation="q8_32",
    unpack=_unpack_q2_0,
)
"""d (q - 1), q in 0..3; 2.25 bits a weight."""
