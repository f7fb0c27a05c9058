"""Golden logits: what llama.cpp computed for the tiny models.

F32 weights, F32 KV cache, no flash attention.  Of deepseek2_lite the first 42 positions are kept:
at the next one two experts score alike to the last bits of f32, and which is chosen is chance.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NAMES = tuple(TINY_MODELS)


@dataclass(frozen=True)
class GoldenCase:
    """path: the model, written for this test; tokens i32[n]; logits f32[n, 96]."""

    name: str
    path: Path
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]


def golden_case(name: str, directory: Path, model: TinyModel | None = None) -> GoldenCase:
    """Tiny model `name` (or `model`, another form of it), written into `directory`."""
    original = TINY_MODELS[name]()
    with np.load(GOLDEN / f"{name}.npz") as stored:
        tokens, logits = stored["tokens"], stored["logits"]
        expected = stored["weights_sha256"].item()
    if weights_sha256(original) != expected:
        raise RuntimeError(
            f"the weights of '{name}' are not those that llama.cpp ran: tiny_models.py draws in "
            f"another order, or NumPy {np.__version__} changed Generator.standard_normal"
        )
    path = (model or original).write(directory / f"{name}.gguf")
    return GoldenCase(name, path, tokens, logits)


def weights_sha256(model: TinyModel) -> str:
    """Digest of all tensors' names, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for tensor in model.tensors:
        digest.update(f"{tensor.name} {tensor.shape}".encode() + tensor.data)
    return digest.hexdigest()
