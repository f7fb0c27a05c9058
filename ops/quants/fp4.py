"""MXFP4 and NVFP4: 4-bit floating-point codes under an 8-bit floating-point scale.

Codes are doubled to make them integers, so both scales carry a factor of one half.
"""

from __future__ import annotations

import numpy as np

from ops.quants.block import F32, U8, Codes, Fields, IntegerFormat, bit_planes
from ops.quants.codebooks import FP4_VALUES


def _unpack_mxfp4(fields: Fields) -> Codes:
    codes = FP4_VALUES[bit_planes(fields["qs"], 4)].reshape(-1, 32)
    return Codes(half_e8m0(fields["e"]), codes)


def _unpack_nvfp4(fields: Fields) -> Codes:
    codes = FP4_VALUES[bit_planes(fields["qs"], 4)].reshape(-1, 64)
    return Codes(half_ue4m3(fields["scales"]), codes)


def half_e8m0(exponents: U8) -> F32:
    """2^(e - 128): exponents 0 and 1 are subnormal in f32."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def half_ue4m3(scales: U8) -> F32:
    """Half of an unsigned E4M3 number of bias 7; NaN (0x7f) counts as zero, bit 7 is unused."""
    exponent = (scales >> 3 & 15).astype(np.int32)
    mantissa = (scales & 7).astype(np.int32)
    significand = np.where(exponent > 0, mantissa + 8, mantissa).astype(np.float32)
    value = np.ldexp(significand, np.maximum(exponent, 1) - 11)
    return np.where(scales == 0x7F, np.float32(0), value)


MXFP4 = IntegerFormat(
    name="MXFP4",
    ggml_type=39,
    layout=np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    block_elems=32,
    activation="q8_32",
    unpack=_unpack_mxfp4,
)
"""2^(e - 128) times twice the E2M1 value; 4.25 bits a weight."""

NVFP4 = IntegerFormat(
    name="NVFP4",
    ggml_type=40,
    layout=np.dtype([("scales", "u1", 4), ("qs", "u1", (4, 8))]),
    block_elems=64,
    activation="q8_32",
    scale_elems=16,
    unpack=_unpack_nvfp4,
)
"""UE4M3 scale per 16 weights, E2M1 codes; 4.5 bits a weight."""
