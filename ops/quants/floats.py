"""Unquantized weights: F32, F16, BF16, and F64 by conversion."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.quants.block import F32, FloatFormat


def _to_f32(values: NDArray[Any]) -> F32:
    return values.astype(np.float32)


def _bf16_to_f32(words: NDArray[Any]) -> F32:
    return (words.astype(np.uint32) << 16).view(np.float32)


F32_FORMAT = FloatFormat(
    name="F32",
    ggml_type=0,
    layout=np.dtype("<f4"),
    block_elems=1,
    activation="f32",
    to_f32=_to_f32,
)

F16 = FloatFormat(
    name="F16",
    ggml_type=1,
    layout=np.dtype("<f2"),
    block_elems=1,
    activation="f32",
    to_f32=_to_f32,
)

BF16 = FloatFormat(
    name="BF16",
    ggml_type=30,
    layout=np.dtype("<u2"),
    block_elems=1,
    activation="f32",
    to_f32=_bf16_to_f32,
)
"""The upper half of an f32, kept as its bits: NumPy has no such type."""

F64 = FloatFormat(
    name="F64",
    ggml_type=28,
    layout=np.dtype("<f8"),
    block_elems=1,
    activation="f32",
    to_f32=_to_f32,
)
"""Accepted by conversion only: a loader replaces such a tensor by `dequantize_rows` of it, rounded
to nearest, and no kernel reads it."""
