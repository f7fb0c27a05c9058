"""Specs of models with recurrent layers: sizes, other spellings in files, and contradictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CorruptModel, ModelError
from runtime.models import open_model
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.sizes import model_sizes
from runtime.models.spec import AttentionSpec, ModelSpec
from tests.support.gguf_writer import ARRAY, UINT64, Typed
from tests.support.golden import golden_case
from tests.support.reference_model import reference_logits
from tests.support.reference_streams import ngram_rows
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS


def spec_of(model: TinyModel, folder: Path) -> ModelSpec:
    with open_model(model.write(folder / "model.gguf")) as opened:
        return opened.spec


def test_states_and_keys_of_a_hybrid_are_counted(tmp_path: Path) -> None:
    with open_model(TINY_MODELS["qwen35"]().write(tmp_path / "model.gguf")) as opened:
        spec = opened.spec
        sizes = model_sizes(spec, opened.file.tensors)
    channels, matrices = 2 * 2 * 16 + 6 * 16, 6 * 16 * 16
    assert [isinstance(layer.mixer, DeltaNetSpec) for layer in spec.layers] == [True] * 3 + [False]
    assert sizes.state_bytes == spec.state_bytes == 3 * 4 * (3 * channels + matrices)
    assert sizes.kv_elems_per_token == 2 * 2 * 32, "the one layer of attention"


def test_tables_and_block_keys_are_counted(tmp_path: Path) -> None:
    with open_model(TINY_MODELS["qwen4exp"]().write(tmp_path / "model.gguf")) as opened:
        spec, tensors = opened.spec, opened.file.tensors
        sizes = model_sizes(spec, tensors)
    assert sizes.memory_bytes == 4 * 16 * 420
    assert sizes.kv_elems_per_token == 2 * (2 * 2 * 32 + 16 // 4)
    trunk = {name: t for name, t in tensors.items() if not name.startswith("blk.8.")}
    assert sizes.total_bytes == sum(tensor.n_bytes for tensor in trunk.values())
    memory, indexer = 4 * 3 * 3 * 4 * 64, 4 * 4 * 16
    plain = sum(la.mixer.state_bytes for la in spec.layers if isinstance(la.mixer, DeltaNetSpec))
    assert spec.state_bytes == plain + memory + 2 * indexer
    assert (spec.n_stream, spec.n_previous) == (4, 2)


def test_recurrent_layers_may_be_listed(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen35"]()
    plain = spec_of(model, tmp_path)
    del model.metadata["qwen35.full_attention_interval"]
    model.set(attention__recurrent_layers=[True, True, True, False, False])
    assert spec_of(model, tmp_path) == plain
    model.set(attention__recurrent_layers=[True, True, False, False, False])
    with pytest.raises(CorruptModel, match=r"blk\.2\.attn_q"):
        spec_of(model, tmp_path)


def test_both_names_of_glm5_are_the_same_model(tmp_path: Path) -> None:
    model = TINY_MODELS["glm5_next"]()
    plain = spec_of(model, tmp_path)
    other = TinyModel("glm5next")
    other.tensors = model.tensors
    for key, value in model.metadata.items():
        other.metadata[key.replace("glm5-next.", "glm5next.")] = value
    other.metadata["general.architecture"] = "glm5next"
    assert replace(spec_of(other, tmp_path), architecture="glm5-next") == plain


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("qwen4exp", "blk.0.hc_attn_norm.weight", (64, 4)),
        ("qwen4exp", "blk.1.ple_norm_key.weight", (64, 4)),
        ("glm5_next", "blk.0.ssm_conv1d_q.weight", (4, 64)),
        ("glm5_next", "blk.0.ssm_conv1d_q.weight", (4, 1, 64)),
    ],
)
def test_shapes_that_files_spell_differently(
    name: str, tensor: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = TINY_MODELS[name]()
    plain = spec_of(model, tmp_path)
    index = next(i for i, t in enumerate(model.tensors) if t.name == tensor)
    model.tensors[index] = replace(model.tensors[index], shape=shape)
    assert spec_of(model, tmp_path) == plain


@pytest.mark.parametrize(
    "name", ["olmoe", "llama", "deepseek2", "glm4moe", "mimo2", "qwen35", "glm5_next"]
)
def test_widths_may_be_listed(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]()
    plain = spec_of(model, tmp_path)
    key = f"{model.architecture}.feed_forward_length"
    n_blocks = model.metadata[f"{model.architecture}.block_count"]
    model.metadata[key] = [model.metadata[key]] * n_blocks
    assert spec_of(model, tmp_path) == plain


def test_attention_without_a_block_size_reads_everything(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen4exp"]()
    model.tensors = [t for t in model.tensors if ".indexer." not in t.name]
    model.set(attention__compress_ratios=[0] * 9)
    mixers = [layer.mixer for layer in spec_of(model, tmp_path).layers]
    assert all(m.indexer is None for m in mixers if isinstance(m, AttentionSpec))


def u64(*values: int) -> Typed:
    return Typed(ARRAY, [Typed(UINT64, value) for value in values])


WRONG: list[tuple[str, str, Any]] = [
    ("qwen35", "ssm.state_size", 24),
    ("qwen35", "ssm.group_count", 4),
    ("qwen35", "ssm.inner_size", 100),
    ("qwen35", "ssm.conv_kernel", 1),
    ("qwen4exp", "hyper_connection.count", 1),
    ("qwen4exp", "attention.indexer.top_k", 3),
    ("qwen4exp", "attention.compress_ratios", [3] * 9),
    ("qwen4exp", "ple.ngram_size", 4),
    ("qwen4exp", "ple.layer_multipliers", u64(1, 2)),
    ("qwen4exp", "ple.layer_multipliers", "one"),
    ("qwen4exp", "ple.layer_multipliers", [-1, 2, 3]),
    ("qwen4exp", "ple.head_vocab_sizes", u64(101, 0, 107, 109)),
    ("qwen4exp", "ple.head_offsets", u64(0, 101, 204, 312)),
    ("qwen4exp", "ple.head_offsets", u64(0, 101, 204)),
    ("qwen4exp", "ple.eos_token_id", 96),
    ("glm5_next", "kda.head_dim", 15),
    ("glm5_next", "kda.gate_lower_bound", float("inf")),
    ("glm5_next", "kda.gate_lower_bound", True),
    ("glm5_next", "attention.indexer.kpool", 3),
    ("glm5_next", "attention.indexer.kpool_select_tail", False),
    ("glm5_next", "swiglu_clamp_exp", [1.5]),
    ("glm5_next", "hyper_connection.epsilon", 0.0),
    ("glm5_next", "hyper_connection.sinkhorn_iterations", 2**31 - 1),
    ("glm5_next", "kda.gate_lower_bound", 3.0),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_contradictions_are_named(name: str, key: str, value: Any, tmp_path: Path) -> None:
    model = TINY_MODELS[name]()
    model.metadata[f"{model.architecture}.{key}"] = value
    with pytest.raises(ModelError, match=r"ssm|hyper|indexer|ple|kda|swiglu|compress|sparse|embed"):
        spec_of(model, tmp_path)


@pytest.mark.parametrize("types", [[False] * 6, [True] + [False] * 3 + [True] * 2])
def test_attention_needs_an_indexer_before_it(types: list[bool], tmp_path: Path) -> None:
    """Layer 1 is the first with attention; layer 0 has no keys to choose."""
    model = TINY_MODELS["glm5_next"]()
    model.metadata["glm5-next.attention.indexer.types"] = types
    with pytest.raises(CorruptModel, match="layer 1 has no indexer, nor one before it"):
        spec_of(model, tmp_path)


def test_rows_of_contexts_are_those_of_plain_numbers(tmp_path: Path) -> None:
    memory = spec_of(TINY_MODELS["qwen4exp"](), tmp_path).layers[1].memory
    assert isinstance(memory, NgramMemorySpec)
    tokens = [7, 3, 7, 7, 5, 90, 2, 7, 1]  # 7 ends a text
    contexts = [
        [tokens[i - j] if j <= i else -1 for j in range(memory.n_gram)] for i in range(len(tokens))
    ]
    rows = memory.rows(np.array(contexts, np.int32))
    assert rows.tolist() == [ngram_rows(memory, tokens[: i + 1]) for i in range(len(tokens))]
    few = [memory.rows(np.array(contexts[i : i + 2], np.int32)) for i in range(len(tokens) - 1)]
    assert [part.tolist() for part in few] == [rows[i : i + 2].tolist() for i in range(len(few))]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen35", "attention.layer_norm_rms_epsilon", 1e-2),
        ("qwen4exp", "attention.indexer.top_k", 12),
        ("qwen4exp", "ple.eos_token_id", 8),
        ("qwen4exp", "ple.layer_multipliers", u64(3, 17592186044399, 29000000000033)),
        ("glm5_next", "kda.gate_lower_bound", -4.0),
        ("glm5_next", "attention.indexer.top_k", 12),
        ("glm5_next", "attention.indexer.types", [True] * 4 + [False] * 2),
        ("glm5_next", "hyper_connection.sinkhorn_iterations", 1),
        ("glm5_next", "swiglu_clamp_shexp", [1.1] * 7),
    ],
)
def test_a_wrong_number_moves_the_logits(name: str, key: str, value: Any, tmp_path: Path) -> None:
    """The comparison with llama.cpp has teeth."""
    wrong = TINY_MODELS[name]()
    assert wrong.metadata[f"{wrong.architecture}.{key}"] != value
    wrong.metadata[f"{wrong.architecture}.{key}"] = value
    if key.endswith("types"):  # layer 4 would then read what layer 1 has chosen
        unused = [t for t in wrong.tensors if t.name.startswith("blk.4.indexer")]
        wrong.tensors = [t for t in wrong.tensors if t not in unused]
    case = golden_case(name, tmp_path, wrong)
    with open_model(case.path) as model:
        logits = reference_logits(model, case.tokens[:60])
    assert np.abs(logits - case.logits[:60]).max() > 1e-3
