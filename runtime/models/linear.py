"""Linear: one matrix of a model by the names of its tensors, or a stack of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """y = scale * (W x) + bias.

    weight    n_out rows of n_in values; with `n_expert`, that many such matrices one after another
    bias      f32[n_out], or f32[n_expert, n_out]
    scale     one f32, or f32[n_expert] (files quantized to NVFP4 have it); None: 1
    n_expert  None: one matrix
    """

    weight: str
    n_in: int
    n_out: int
    bias: str | None = None
    scale: str | None = None
    n_expert: int | None = None
