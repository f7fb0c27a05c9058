"""Files of real models' shapes: they open, compute, and have the sizes of the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType

from bench.synthetic import MODELS, sketch_of, write_model
from bench.synthetic.blocks import random_blocks
from ops.quants import FORMATS
from runtime.models import open_model
from runtime.models.spec import MoeSpec

SMALL: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {"n_embd": 256, "n_head": 4, "n_head_kv": 4, "head_dim": 64, "n_ff": 256},
    "qwen3-30b-a3b": {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_ff": 256},
    "gpt-oss-20b": {"n_embd": 192, "n_head": 4, "n_head_kv": 2, "n_ff": 96},
    "glm-4.5-air": {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 96, "n_ff_dense": 256},
    "mimo-v2.6-flash": {
        "n_embd": 256, "n_head": 8, "n_head_kv": 1, "n_head_kv_window": 2, "dim_k": 96,
        "dim_v": 64, "n_ff": 256, "n_ff_dense": 512, "window": 8,
    },
    "deepseek-v2-lite": {
        "n_embd": 256, "n_head": 4, "dim_nope": 32, "dim_rope": 32, "dim_latent": 64,
        "dim_v": 32, "n_ff": 96, "n_ff_dense": 256,
    },
    "glm-4.7-flash": {
        "n_embd": 256, "n_head": 4, "rank": 256, "dim_nope": 32, "dim_rope": 32,
        "dim_latent": 64, "dim_v": 64, "n_ff": 256, "n_ff_dense": 256,
    },
    "glm-5.3-flash": {
        "n_embd": 256, "n_head": 4, "kda_dim": 32, "rank": 256, "dim_latent": 64, "dim_head": 32,
        "n_index_head": 4, "index_dim": 32, "top_k": 16, "n_ff": 256, "n_ff_dense": 256,
    },
    "qwen3.8-27b": {
        "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_rot": 64, "state_dim": 32,
        "n_key_head": 2, "n_value_head": 6, "n_ff": 512,
    },
    "qwen3.8-flash-next": {
        "n_embd": 512, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "state_dim": 32,
        "n_key_head": 2, "n_value_head": 6, "n_ff": 160, "n_low": 32, "n_index_head": 4,
        "index_dim": 64, "top_k": 16, "n_table_rows": 1600, "end_token": 7,
    },
}  # fmt: skip
N_LAYERS = 8


def small(name: str) -> Any:
    """A model's shape, narrow."""
    shape: Any = replace(MODELS[name], n_vocab=512, **SMALL[name])  # type: ignore[type-var]
    return replace(shape, n_expert=16) if hasattr(shape, "n_expert") else shape


@pytest.mark.parametrize("name", SMALL)
def test_a_file_opens_as_the_model_it_imitates(name: str, tmp_path: Path) -> None:
    shape = small(name)
    write_model(tmp_path / "model.gguf", shape, N_LAYERS, skew=0.5)
    with open_model(tmp_path / "model.gguf") as model:
        spec = model.spec
        assert (spec.architecture, len(spec.layers)) == (shape.architecture, N_LAYERS)
        for linear in spec.linears:
            values = model.weights[linear.weight].to_f32()
            assert np.isfinite(values).all()
            if linear.weight.split(".")[-2] not in ("token_embd", "ffn_gate_inp"):
                assert abs(float(values.std()) * np.sqrt(values.shape[-1]) - 1) < 0.3, linear.weight
        blocks = [layer.feed_forward for layer in spec.layers]
        routed = [block for block in blocks if isinstance(block, MoeSpec)]
        assert all(block.n_expert == 16 and block.n_used == shape.n_used for block in routed)


REAL = {
    # name: (bytes of the file, of all experts), from the headers of real files or their tables
    "gpt-oss-20b": (12.1e9, 10.2e9),
    "gpt-oss-120b": (63e9, 60.9e9),
    "glm-4.7-flash": (18.2e9, 16.8e9),
    "glm-5.3-flash": (113.6e9, 107.2e9),
    "mimo-v2.6-flash": (128e9, 123e9),
    "qwen3-30b-a3b": (18.5e9, 17.6e9),
    "qwen3.8-27b": (16e9, 0),
    "qwen3.8-flash-next": (94.5e9, 60e9),
}


@pytest.mark.parametrize("name", REAL)
def test_sizes_are_those_of_real_files(name: str) -> None:
    shape = MODELS[name]
    sketch = sketch_of(shape, shape.n_layers)
    n_bytes, n_expert_bytes = REAL[name]
    assert abs(sketch.n_bytes / n_bytes - 1) < 0.04
    assert abs(sketch.bytes_of("_exps.weight") - n_expert_bytes) <= 0.03 * n_expert_bytes


def test_keys_of_the_table_are_64_bits_wide_as_llama_cpp_wants_them(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", small("qwen3.8-flash-next"), 2, 0.5)
    fields = GGUFReader(tmp_path / "model.gguf").fields
    for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes"):
        assert fields[f"qwen4exp.ple.{name}"].types[-1] is GGUFValueType.UINT64, name


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second", "third")]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        write_model(path, small("glm-5.3-flash"), 2, 0.5, seed)
    first, second, third = (path.read_bytes() for path in files)
    assert first == second != third


def test_a_large_table_is_a_hole(tmp_path: Path) -> None:
    shape = replace(small("qwen3.8-flash-next"), n_table_rows=16 * (1 << 20))
    write_model(tmp_path / "model.gguf", shape, 2, 0.5)
    found = (tmp_path / "model.gguf").stat()
    assert 512 * found.st_blocks < found.st_size / 10
    with open_model(tmp_path / "model.gguf") as model:
        table = model.weights["per_layer_token_embd.weight"]
        assert table.n_bytes == 16 * (1 << 20) * FORMATS["IQ4_NL"].block_bytes


@pytest.mark.parametrize("name", ["MXFP4", "F32", "BF16", "Q2_K", "Q5_K", "IQ2_S", "Q1_0"])
def test_blocks_have_the_spread_they_should(name: str) -> None:
    rng = np.random.default_rng(0)
    values = FORMATS[name].dequantize(random_blocks(FORMATS[name], 4000, 0.05, rng))
    assert abs(float(values.std()) / 0.05 - 1) < 0.05
    assert abs(float(values.mean())) < 0.005


def test_blocks_without_a_plain_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="no random NVFP4"):
        random_blocks(FORMATS["NVFP4"], 10, 1.0, np.random.default_rng(0))
