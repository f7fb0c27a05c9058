"""Vectors that no text could come from are typed errors that name the tensor, on every device."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import runtime
from runtime.models import open_model
from runtime.models.vectors import check_vectors, rope_factors
from tests.support.gguf_writer import f32_tensor
from tests.support.tiny_models import TINY_MODELS


def written(folder: Path, name: str, tensor: str, place: int, value: float) -> Path:
    """A tiny model with one number of a tensor replaced."""
    model = TINY_MODELS[name]()
    index = next(i for i, one in enumerate(model.tensors) if one.name == tensor)
    old = model.tensors[index]
    values = np.frombuffer(old.data, np.float32).reshape(*reversed(old.shape)).copy()
    values.reshape(-1)[place] = value
    model.tensors[index] = replace(f32_tensor(tensor, values), shape=old.shape)
    return model.write(folder / "model.gguf")


SILENT = [
    ("glm5_next", "blk.1.exp_probs_b.bias"),
    ("glm5_next", "blk.1.indexer.k_norm.bias"),
    ("qwen4exp", "blk.1.ple_norm_query.weight"),
    ("qwen2moe", "blk.1.attn_q.bias"),
    ("olmoe", "output_norm.weight"),
]
"""The first three only choose: the logits stay finite."""


@pytest.mark.parametrize(("name", "tensor"), SILENT)
async def test_nan_in_a_vector_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, tensor, 5, np.nan)
    with pytest.raises(runtime.CorruptModel, match=f"'{tensor}' is NaN at 5 of"):
        async with runtime.open_engine(runtime.EngineConfig(model=path, device="cpu", n_ctx=64)):
            pass


def test_experts_may_be_forbidden(tmp_path: Path) -> None:
    path = written(tmp_path, "glm5_next", "blk.1.exp_probs_b.bias", 5, -np.inf)
    with open_model(path) as model:
        check_vectors(model)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
async def test_divisors_of_rope_are_checked(value: float, tmp_path: Path) -> None:
    path = written(tmp_path, "llama_dense", "rope_freqs.weight", 3, value)
    expected = pytest.raises(runtime.CorruptModel, match=r"'rope_freqs.weight' is \S+ at 3: use")
    with open_model(path) as model, expected:
        rope_factors(model, model.spec.layers[0].mixer.rope)
    with warnings.catch_warnings(), expected:
        warnings.simplefilter("error")
        async with runtime.open_engine(runtime.EngineConfig(model=path, device="cpu", n_ctx=64)):
            pass
