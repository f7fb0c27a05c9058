"""The five formats with 32-value blocks and plain integer codes."""

from __future__ import annotations

import numpy as np

from ops.quants.block import I32, Codes, Fields, IntegerFormat, as_f32, bit_fields, bit_planes

_ELEMS = 32


def _nibbles(fields: Fields) -> I32:
    """Low halves of the 16 bytes are values 0..15, high halves 16..31."""
    return bit_planes(fields["qs"], 4).reshape(-1, _ELEMS)


def _five_bits(fields: Fields) -> I32:
    high = bit_fields(fields["qh"], 1, 8).reshape(-1, _ELEMS)
    return _nibbles(fields) | high << 4


def _unpack_q4_0(fields: Fields) -> Codes:
    return Codes(as_f32(fields["d"]), _nibbles(fields) - 8)


def _unpack_q4_1(fields: Fields) -> Codes:
    return _with_min(fields, _nibbles(fields))


def _unpack_q5_0(fields: Fields) -> Codes:
    return Codes(as_f32(fields["d"]), _five_bits(fields) - 16)


def _unpack_q5_1(fields: Fields) -> Codes:
    return _with_min(fields, _five_bits(fields))


def _unpack_q8_0(fields: Fields) -> Codes:
    return Codes(as_f32(fields["d"]), fields["qs"].astype(np.int32))


def _with_min(fields: Fields, codes: I32) -> Codes:
    ones = np.ones((len(fields), 1), np.int32)
    return Codes(as_f32(fields["d"]), codes, min_scale=as_f32(fields["m"]), mins=ones)


Q4_0 = IntegerFormat(
    name="Q4_0",
    ggml_type=2,
    layout=np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    block_elems=_ELEMS,
    activation="q8_32",
    unpack=_unpack_q4_0,
)
"""d (q - 8); 4.5 bits a weight."""

Q4_1 = IntegerFormat(
    name="Q4_1",
    ggml_type=3,
    layout=np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    block_elems=_ELEMS,
    activation="q8_32",
    has_mins=True,
    unpack=_unpack_q4_1,
)
"""d q + m; 5 bits a weight."""

Q5_0 = IntegerFormat(
    name="Q5_0",
    ggml_type=6,
    layout=np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    block_elems=_ELEMS,
    activation="q8_32",
    unpack=_unpack_q5_0,
)
"""d (q - 16), bit i of `qh` the fifth bit of value i; 5.5 bits a weight."""

Q5_1 = IntegerFormat(
    name="Q5_1",
    ggml_type=7,
    layout=np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    block_elems=_ELEMS,
    activation="q8_32",
    has_mins=True,
    unpack=_unpack_q5_1,
)
"""d q + m; 6 bits a weight."""

Q8_0 = IntegerFormat(
    name="Q8_0",
    ggml_type=8,
    layout=np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    block_elems=_ELEMS,
    activation="q8_32",
    unpack=_unpack_q8_0,
)
"""d q; 8.5 bits a weight."""
