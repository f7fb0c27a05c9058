"""The K-quants: 256-value blocks of 16- or 32-value sub-blocks with integer sub-scales."""

from __future__ import annotations

import numpy as np

from ops.quants.block import I32, U8, Codes, Fields, IntegerFormat, as_f32, bit_fields, bit_planes

_ELEMS = 256


def _unpack_q2_k(fields: Fields) -> Codes:
    scale_min = bit_fields(fields["scales"], 4, 2)
    return Codes(
        scale=as_f32(fields["d"]),
        codes=_two_bits(fields),
        sub_scales=scale_min[..., 0],
        min_scale=-as_f32(fields["dmin"]),
        mins=scale_min[..., 1],
    )


def _unpack_q3_k(fields: Fields) -> Codes:
    high = bit_planes(fields["hmask"], 1).reshape(-1, _ELEMS)
    packed = fields["scales"]
    low = bit_planes(packed[:, :8], 4).reshape(-1, 16)
    top = bit_planes(packed[:, 8:], 2).reshape(-1, 16)
    return Codes(
        scale=as_f32(fields["d"]),
        codes=_two_bits(fields) + 4 * high - 4,
        sub_scales=(low | top << 4) - 32,
    )


def _unpack_q4_k(fields: Fields) -> Codes:
    return _with_mins(fields, _nibble_groups(fields))


def _unpack_q5_k(fields: Fields) -> Codes:
    high = bit_planes(fields["qh"], 1).reshape(-1, _ELEMS)
    return _with_mins(fields, _nibble_groups(fields) | high << 4)


def _unpack_q6_k(fields: Fields) -> Codes:
    low = bit_planes(fields["ql"].reshape(-1, 2, 64), 4).reshape(-1, _ELEMS)
    high = bit_planes(fields["qh"].reshape(-1, 2, 32), 2).reshape(-1, _ELEMS)
    return Codes(
        scale=as_f32(fields["d"]),
        codes=(low | high << 4) - 32,
        sub_scales=fields["scales"].astype(np.int32),
    )


def _two_bits(fields: Fields) -> I32:
    """Each half of 128 values is 32 bytes; bit pairs 0, 1, 2, 3 hold 32 neighbouring values."""
    return bit_planes(fields["qs"].reshape(-1, 2, 32), 2).reshape(-1, _ELEMS)


def _nibble_groups(fields: Fields) -> I32:
    """Each group of 64 values is 32 bytes: low halves first, then high halves."""
    return bit_planes(fields["qs"].reshape(-1, 4, 32), 4).reshape(-1, _ELEMS)


def _with_mins(fields: Fields, codes: I32) -> Codes:
    sub_scales, mins = _six_bit_pairs(fields["scales"])
    return Codes(as_f32(fields["d"]), codes, sub_scales, -as_f32(fields["dmin"]), mins)


def _six_bit_pairs(packed: U8) -> tuple[I32, I32]:
    """u8[n, 12] -> scales i32[n, 8], mins i32[n, 8].

    Bytes 0..3 and 4..7 hold scales and mins 0..3 in their low six bits; bytes 8..11 hold the low
    halves of scales and mins 4..7, whose top two bits are the top bits of bytes 0..7.
    """
    first, second, tail = packed.astype(np.int32).reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate([first & 63, tail & 15 | first >> 6 << 4], axis=1)
    mins = np.concatenate([second & 63, tail >> 4 | second >> 6 << 4], axis=1)
    return scales, mins


Q2_K = IntegerFormat(
    name="Q2_K",
    ggml_type=10,
    layout=np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
    block_elems=_ELEMS,
    activation="q8_256",
    has_mins=True,
    unpack=_unpack_q2_k,
)
"""d s q - dmin m, 16 values a sub-block; 2.625 bits a weight."""

Q3_K = IntegerFormat(
    name="Q3_K",
    ggml_type=11,
    layout=np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_q3_k,
)
"""d (s - 32) (q - 4), 16 values a sub-block; 3.4375 bits a weight."""

Q4_K = IntegerFormat(
    name="Q4_K",
    ggml_type=12,
    layout=np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    block_elems=_ELEMS,
    activation="q8_256",
    has_mins=True,
    unpack=_unpack_q4_k,
)
"""d s q - dmin m, 32 values a sub-block; 4.5 bits a weight."""

Q5_K = IntegerFormat(
    name="Q5_K",
    ggml_type=13,
    layout=np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    block_elems=_ELEMS,
    activation="q8_256",
    has_mins=True,
    unpack=_unpack_q5_k,
)
"""As Q4_K with a fifth bit, bit j of `qh[l]` for value l of sub-block j; 5.5 bits a weight."""

Q6_K = IntegerFormat(
    name="Q6_K",
    ggml_type=14,
    layout=np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
    block_elems=_ELEMS,
    activation="q8_256",
    unpack=_unpack_q6_k,
)
"""d s (q - 32), 16 values a sub-block; 6.5625 bits a weight."""
