"""The weight formats of GGUF files, by name in `FORMATS`, by number with `format_of_type`."""

from __future__ import annotations

from ops.quants.block import ActivationKind, BlockFormat, FloatFormat, IntegerFormat, Units
from ops.quants.floats import BF16, F16, F32_FORMAT, F64
from ops.quants.fp4 import MXFP4, NVFP4
from ops.quants.iq1 import IQ1_M, IQ1_S
from ops.quants.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from ops.quants.iq3 import IQ3_S, IQ3_XXS
from ops.quants.iq4 import IQ4_NL, IQ4_XS
from ops.quants.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from ops.quants.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from ops.quants.low_bit import Q1_0, Q2_0

__all__ = [
    "FORMATS",
    "ActivationKind",
    "BlockFormat",
    "FloatFormat",
    "IntegerFormat",
    "Units",
    "format_of_type",
]

FORMATS: dict[str, BlockFormat] = {
    "F32": F32_FORMAT,
    "F16": F16,
    "BF16": BF16,
    "F64": F64,
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q5_0,
    "Q5_1": Q5_1,
    "Q8_0": Q8_0,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M,
    "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS,
    "IQ2_S": IQ2_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ3_S": IQ3_S,
    "IQ4_NL": IQ4_NL,
    "IQ4_XS": IQ4_XS,
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    "Q1_0": Q1_0,
    "Q2_0": Q2_0,
}
"""Every format that can be read."""


def format_of_type(ggml_type: int) -> BlockFormat:
    """The format with this number.

    Raises:
        LookupError: no such format; the message lists the known ones.
    """
    for block_format in FORMATS.values():
        if block_format.ggml_type == ggml_type:
            return block_format
    known = ", ".join(f"{f.ggml_type} {f.name}" for f in FORMATS.values())
    raise LookupError(f"unknown tensor type {ggml_type}; the known ones are {known}")
