"""A tiny model with its matrices rounded to a block format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ops.quants import FORMATS
from tests.support.gguf_writer import Tensor
from tests.support.tiny_model import TinyModel


def q8_0(model: TinyModel) -> TinyModel:
    """`model` with every matrix Q8_0 whose rows are multiples of 32; routers and taps stay F32."""
    out = TinyModel(model.architecture, model.seed, dict(model.metadata))
    out.tensors += [_rounded(tensor) for tensor in model.tensors]
    return out


def _rounded(tensor: Tensor) -> Tensor:
    kept = ("gate_inp", "conv1d", "norm", "token_embd", "_shexp")
    if len(tensor.shape) < 2 or tensor.shape[0] % 32 or any(word in tensor.name for word in kept):
        return tensor
    fmt = FORMATS["Q8_0"]
    values = np.frombuffer(tensor.data, "<f4").reshape(-1, 32)
    blocks = np.zeros(len(values), fmt.layout)
    scales = (np.abs(values).max(axis=1) / 127).astype(np.float16)
    blocks["d"] = scales
    names = [name for name in fmt.layout.names or () if name != "d"]
    blocks[names[0]] = np.rint(values / scales[:, None].astype(np.float32))
    return replace(tensor, data=blocks.tobytes(), ggml_type=fmt.ggml_type)
