"""What a model calls itself, in one line: much as llama-bench does, `olmoe Q4_K - Medium`."""

from __future__ import annotations

from collections.abc import Mapping

MAX_LABEL = 120  # characters

# `general.file_type` -> the mix of weight formats
FILE_TYPES = {
    0: "all F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K - Medium",
    11: "Q3_K - Small",
    12: "Q3_K - Medium",
    13: "Q3_K - Large",
    14: "Q4_K - Small",
    15: "Q4_K - Medium",
    16: "Q5_K - Small",
    17: "Q5_K - Medium",
    18: "Q6_K",
    19: "IQ2_XXS - 2.0625 bpw",
    20: "IQ2_XS - 2.3125 bpw",
    21: "Q2_K - Small",
    22: "IQ3_XS - 3.3 bpw",
    23: "IQ3_XXS - 3.0625 bpw",
    24: "IQ1_S - 1.5625 bpw",
    25: "IQ4_NL - 4.5 bpw",
    26: "IQ3_S - 3.4375 bpw",
    27: "IQ3_S mix - 3.66 bpw",
    28: "IQ2_S - 2.5 bpw",
    29: "IQ2_M - 2.7 bpw",
    30: "IQ4_XS - 4.25 bpw",
    31: "IQ1_M - 1.75 bpw",
    32: "BF16",
    38: "MXFP4 MoE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}


def label(value: object) -> str:
    """A name that a file gives, fit to be printed: no control characters, one short line."""
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_LABEL])


def file_type_name(file_type: int) -> str:
    """The mix of weight formats as llama.cpp spells it; empty for an unknown number."""
    return FILE_TYPES.get(file_type, "")


def model_type(architecture: str, metadata: Mapping[str, object], file_type: int) -> str:
    """Architecture, size label (where the file has one) and weight formats."""
    parts = (architecture, label(metadata.get("general.size_label")), file_type_name(file_type))
    return " ".join(part for part in parts if part)
