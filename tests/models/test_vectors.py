"""Numbers that no text could come from are typed errors that name the tensor, on every device."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from ops.quants import FORMATS
from runtime.models import open_model
from runtime.models.vectors import check_numbers, has_nan, rope_factors
from runtime.models.weights import Weight
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
    ("glm5_next", "blk.1.indexer.attn_k.weight"),
    ("glm5_next", "blk.4.indexer.attn_q_b.weight"),
    ("glm5_next", "blk.4.indexer_compressor_gate.weight"),
    ("qwen4exp", "blk.7.indexer.q_proj.weight"),
    ("qwen4exp", "blk.1.ple_key.weight"),
    ("gpt_oss", "blk.2.ffn_gate_inp.weight"),
]
"""The first three, and the matrices, only choose: the logits stay finite."""


@pytest.mark.parametrize(("name", "tensor"), SILENT)
async def test_nan_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, tensor, 5, np.nan)
    with pytest.raises(runtime.CorruptModel, match=f"'{tensor}' is NaN at 5 of"):
        async with runtime.open_engine(runtime.EngineConfig(model=path, device="cpu", n_ctx=64)):
            pass


def numbers_of(name: str) -> tuple[Any, int]:
    """The integers that hold a format's numbers, and the bits of infinity."""
    wide = {"F32": (np.uint32, 0x7F800000), "F64": (np.uint64, 0x7FF << 52)}
    return wide.get(name, (np.uint16, 0x7F80 if name == "BF16" else 0x7C00))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nan_among_stored_numbers_is_found(name: str) -> None:
    """Of either sign, the least and the largest; beside infinities and the largest numbers."""
    fmt, (kind, infinity) = FORMATS[name], numbers_of(name)
    sign = 1 << (8 * kind().itemsize - 1)
    usual = [0, sign, infinity, infinity | sign, infinity - 1, (infinity - 1) | sign, 1]
    layout = fmt.layout
    fields = [field for field in layout.names or () if layout[field].kind == "f"]
    if layout.names is not None and not fields:
        assert name in ("MXFP4", "NVFP4", "IQ1_M")
        return
    for nan in (infinity + 1, infinity + 1 | sign, sign - 1, 2 * sign - 1):
        for words in (usual, [*usual[:-1], nan]):
            numbers = np.array(words, kind)
            stored = numbers.view(np.uint8)
            if fields:
                blocks = np.full((7, layout.itemsize), 0xFF, np.uint8).view(layout)[:, 0]
                for field in fields[:-1]:
                    blocks[field] = 1.0
                blocks[fields[-1]] = numbers.view(np.float16)
                stored = blocks.view(np.uint8)
            weight = Weight("w", fmt, (7 * fmt.block_elems,), stored[None])
            assert has_nan(weight) == (words is not usual)


def test_experts_may_be_forbidden(tmp_path: Path) -> None:
    path = written(tmp_path, "glm5_next", "blk.1.exp_probs_b.bias", 5, -np.inf)
    with open_model(path) as model:
        check_numbers(model)


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
