"""Specs say what the files say; metadata that contradicts the tensors is a typed error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.config import BUNDLED_MODEL
from runtime.errors import CorruptModel, ModelError, UnsupportedArchitecture
from runtime.models import ARCHITECTURES, open_model
from runtime.models.inspect import inspect_model
from runtime.models.model_type import model_type
from runtime.models.rope import RopePairing, rope_frequencies
from runtime.models.sizes import model_sizes
from runtime.models.spec import AttentionSpec, DenseSpec, Linear, MoeSpec, QKNorm, RouterScore
from tests.support.gguf_writer import Tensor, f32_tensor, gguf_bytes
from tests.support.measure import MAX_EXTRA_BYTES, MAX_SECONDS, cost
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS, fused, quantized_olmoe

NAN, INFINITY = math.nan, math.inf

CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("olmoe", "expert_count", 0, "'olmoe.expert_count' is 0"),
    ("olmoe", "expert_count", 1, "expert_used_count"),
    ("olmoe", "expert_count", 7, "'blk.0.ffn_gate_inp.weight' has the shape"),
    ("olmoe", "expert_count", 10**9, "'blk.0.ffn_gate_inp.weight' has the shape"),
    ("olmoe", "expert_count", "8", "whole number"),
    ("olmoe", "expert_count", True, "whole number"),
    ("olmoe", "expert_used_count", 9, "the model has 8 experts"),
    ("olmoe", "expert_used_count", 0, "at least 1"),
    ("olmoe", "expert_weights_scale", NAN, "finite"),
    ("olmoe", "block_count", 0, "at least 1"),
    ("olmoe", "block_count", 4, "'blk.3.attn_norm.weight' is missing"),
    ("olmoe", "block_count", 2**31 - 1, "'blk.3.attn_norm.weight' is missing"),
    ("olmoe", "block_count", -1, "at least 1"),
    ("olmoe", "embedding_length", 0, "at least 1"),
    ("olmoe", "embedding_length", 128, "has the shape"),
    ("olmoe", "feed_forward_length", 49, "'blk.0.ffn_gate_exps.weight' has the shape"),
    ("olmoe", "context_length", 0, "at least 2"),
    ("olmoe", "context_length", 1, "at least 2"),
    ("olmoe", "attention.head_count", 0, "at least 1"),
    ("olmoe", "attention.head_count", 3, "does not divide"),
    ("olmoe", "attention.head_count_kv", 0, "at least 1"),
    ("olmoe", "attention.head_count_kv", 3, "does not divide 4 heads"),
    ("olmoe", "attention.head_count_kv", 2, "'blk.0.attn_k_norm.weight' has the shape"),
    ("olmoe", "attention.head_count_kv", [4, 4], "layer 2 has none"),
    ("olmoe", "attention.layer_norm_rms_epsilon", 0.0, "above 0"),
    ("olmoe", "attention.layer_norm_rms_epsilon", NAN, "finite"),
    ("olmoe", "rope.freq_base", NAN, "finite"),
    ("olmoe", "rope.freq_base", INFINITY, "finite"),
    ("olmoe", "rope.freq_base", 0.0, "above 0"),
    ("olmoe", "rope.freq_base", 1.0, "above 1"),
    ("olmoe", "rope.dimension_count", 18, "even number up to 16"),
    ("olmoe", "rope.dimension_count", 7, "even number up to 16"),
    ("olmoe", "rope.scaling.factor", 0.0, "above 0"),
    ("olmoe", "vocab_size", 97, "the embedding has 96 rows"),
    ("qwen3moe", "attention.key_length", 16, "'blk.0.attn_q_norm.weight' has the shape"),
    ("qwen3moe", "attention.value_length", 16, "'blk.0.attn_v.weight' has the shape"),
    ("qwen2moe", "expert_shared_feed_forward_length", 1, "'blk.0.ffn_gate_shexp.weight'"),
    ("llama_dense", "rope.dimension_count", 8, "'rope_freqs.weight' has the shape"),
    ("llama_dense", "nextn_predict_layers", 1, "block 1 does not draft"),
]


@pytest.mark.parametrize("name, key, value, match", CONTRADICTIONS)
def test_contradiction(name: str, key: str, value: Any, match: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]()
    model.metadata[f"{model.architecture}.{key}"] = value
    path = model.write(tmp_path / "model.gguf")
    with cost() as spent, pytest.raises(CorruptModel, match=match):
        open_model(path)
    assert spent.seconds < MAX_SECONDS
    assert spent.peak_bytes < MAX_EXTRA_BYTES


VOCABULARIES: list[tuple[str, Any, str]] = [
    ("tokens", ["a"] * 95, "has 95 entries, the embedding 96 rows"),
    ("scores", [0.0] * 95, "has 95 entries for 96 tokens"),
    ("token_type", [1] * 97, "has 97 entries for 96 tokens"),
    ("scores", 1.0, "no array"),
]


@pytest.mark.parametrize("name, value, match", VOCABULARIES)
def test_vocabulary_contradiction(name: str, value: Any, match: str, tmp_path: Path) -> None:
    model = TINY_MODELS["llama"]()
    model.metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(CorruptModel, match=match):
        open_model(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("missing", ["output.weight", "blk.1.ffn_up_exps.weight"])
def test_missing_tensor_is_named(missing: str, tmp_path: Path) -> None:
    model = TINY_MODELS["olmoe"]()
    model.tensors = [tensor for tensor in model.tensors if tensor.name != missing]
    with pytest.raises(CorruptModel, match=f"'{missing}' is missing"):
        open_model(model.write(tmp_path / "model.gguf"))


def test_unknown_tensor_is_an_error_not_wrong_text(tmp_path: Path) -> None:
    model = TINY_MODELS["olmoe"]()
    model.tensors.append(f32_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)))
    with pytest.raises(ModelError, match=r"does not know: blk\.0\.attn_sinks\.weight"):
        open_model(model.write(tmp_path / "model.gguf"))


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = TinyModel("mamba").write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedArchitecture, match=", ".join(ARCHITECTURES)):
        open_model(path)
    inspection = inspect_model(path)
    assert inspection.spec is None
    assert "'mamba' is not supported" in inspection.reason


def test_a_file_without_keys_or_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    with pytest.raises(CorruptModel, match=r"general\.architecture"):
        open_model(path)


def test_unknown_rope_scaling(tmp_path: Path) -> None:
    model = TINY_MODELS["llama_dense"]()
    model.set(rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="'longrope' is not supported; none, linear and yarn"):
        open_model(model.write(tmp_path / "model.gguf"))


def test_model_without_a_tokenizer_opens(tmp_path: Path) -> None:
    model = TINY_MODELS["llama"]()
    for key in [key for key in model.metadata if key.startswith("tokenizer.")]:
        del model.metadata[key]
    with open_model(model.write(tmp_path / "model.gguf")) as opened:
        assert opened.spec.n_vocab == 96


def test_spec_of_qwen3moe(tmp_path: Path) -> None:
    with open_model(TINY_MODELS["qwen3moe"]().write(tmp_path / "model.gguf")) as model:
        spec = model.spec
    assert (spec.architecture, spec.name, spec.n_embd, len(spec.layers)) == (
        "qwen3moe",
        "model",
        64,
        3,
    )
    assert not spec.output_is_tied
    attention, moe = spec.layers[2].mixer, spec.layers[2].feed_forward
    assert isinstance(attention, AttentionSpec)
    assert isinstance(moe, MoeSpec)
    assert (attention.n_q, attention.n_k, attention.n_v) == (128, 64, 64)
    assert attention.scale == 32**-0.5
    assert attention.qk_norm is QKNorm.HEAD
    assert attention.rope is not None
    assert (attention.rope.pairing, attention.rope.n_rot) == (RopePairing.NEOX, 32)
    assert (moe.n_expert, moe.n_used, moe.n_ff) == (8, 3, 40)
    assert moe.router.score is RouterScore.SOFTMAX
    assert moe.router.renormalise
    assert moe.down == Linear("blk.2.ffn_down_exps.weight", 40, 64, n_expert=8)


def test_biases_and_shared_expert_of_qwen2moe(tmp_path: Path) -> None:
    with open_model(TINY_MODELS["qwen2moe"]().write(tmp_path / "model.gguf")) as model:
        layer = model.spec.layers[1]
    assert [linear.bias for linear in layer.mixer.qkv] == [
        f"blk.1.attn_{part}.bias" for part in "qkv"
    ]
    assert isinstance(layer.feed_forward, MoeSpec)
    shared = layer.feed_forward.shared
    assert shared is not None
    assert shared.dense.n_ff == 72
    assert shared.gate == Linear("blk.1.ffn_gate_inp_shexp.weight", 64, 1)


def test_tied_output_and_rope_divisors_of_llama(tmp_path: Path) -> None:
    with open_model(TINY_MODELS["llama_dense"]().write(tmp_path / "model.gguf")) as model:
        spec = model.spec
        rope = spec.layers[0].mixer.rope
        assert rope is not None
        divisors = model.weights[str(rope.factors)].to_f32()
    assert spec.output_is_tied
    assert spec.output.weight == "token_embd.weight"
    assert isinstance(spec.layers[0].feed_forward, DenseSpec)
    plain = 5e5 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(rope_frequencies(rope, divisors), plain / divisors, rtol=1e-12)


def test_fused_projections(tmp_path: Path) -> None:
    with open_model(fused(TINY_MODELS["qwen2moe"]()).write(tmp_path / "model.gguf")) as model:
        layer = model.spec.layers[0]
    assert layer.mixer.qkv == (
        Linear("blk.0.attn_qkv.weight", 64, 128, bias="blk.0.attn_qkv.bias"),
    )
    assert isinstance(layer.feed_forward, MoeSpec)
    assert layer.feed_forward.gate_up == (
        Linear("blk.0.ffn_gate_up_exps.weight", 64, 80, n_expert=8),
    )


def test_scales_beside_weights_are_named(tmp_path: Path) -> None:
    model = TINY_MODELS["olmoe"]()
    model.tensors.append(f32_tensor("blk.0.attn_q.scale", np.ones(1, np.float32)))
    model.tensors.append(f32_tensor("blk.0.ffn_up_exps.scale", np.ones(8, np.float32)))
    with open_model(model.write(tmp_path / "model.gguf")) as opened:
        layer = opened.spec.layers[0]
    assert layer.mixer.qkv[0].scale == "blk.0.attn_q.scale"
    assert isinstance(layer.feed_forward, MoeSpec)
    assert layer.feed_forward.gate_up[1].scale == "blk.0.ffn_up_exps.scale"


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3moe"]()
    model.set(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    model.set(rope__scaling__original_context_length=1024)
    with open_model(model.write(tmp_path / "model.gguf")) as opened:
        rope = opened.spec.layers[0].mixer.rope
    assert rope is not None
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    plain = 1e6 ** (-np.arange(16) / 16)
    ratio = rope_frequencies(rope) / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(0.25)
    assert (np.diff(ratio) <= 0).all()


@pytest.mark.parametrize("kind, expected", [("linear", 0.5), ("none", 1.0), (None, 0.5)])
@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_linear_rope_scaling(key: str, kind: str | None, expected: float, tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3moe"]()
    model.metadata[f"qwen3moe.{key}"] = 2.0
    if kind is not None:
        model.set(rope__scaling__type=kind)
    with open_model(model.write(tmp_path / "model.gguf")) as opened:
        rope = opened.spec.layers[0].mixer.rope
    assert rope is not None
    np.testing.assert_allclose(rope_frequencies(rope), expected * 1e6 ** (-np.arange(16) / 16))


def test_expert_weights_scale_of_zero_means_one(tmp_path: Path) -> None:
    for stored, expected in ((0.0, 1.0), (2.5, 2.5)):
        model = TINY_MODELS["olmoe"]()
        model.set(expert_weights_scale=stored)
        with open_model(model.write(tmp_path / "model.gguf")) as opened:
            feed_forward = opened.spec.layers[0].feed_forward
        assert isinstance(feed_forward, MoeSpec)
        assert feed_forward.router.scale == expected


def test_weight_of_a_stack_of_experts(tmp_path: Path) -> None:
    tiny = quantized_olmoe("Q4_K")
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        weight = model.weights["blk.1.ffn_up_exps.weight"]
        stored = next(t for t in tiny.tensors if t.name == weight.name)
        assert weight.shape == (256, 256, 8)
        assert weight.data.shape == (8, 256, 144)
        assert (weight.row_bytes, weight.n_bytes) == (144, 8 * 256 * 144)
        assert weight.data[3].tobytes() == stored.data[3 * 256 * 144 : 4 * 256 * 144]
        assert weight.to_f32().shape == (8, 256, 256)
        assert weight.address == weight.data.ctypes.data
        assert not weight.data.flags.owndata
        assert len(model.weights) == len(tiny.tensors)
        assert "blk.9.attn_q.weight" not in model.weights


def test_f64_tensors_are_converted(tmp_path: Path) -> None:
    model = TINY_MODELS["llama_dense"]()
    values = np.frombuffer(model.tensors[1].data, np.float32)
    name, shape = model.tensors[1].name, model.tensors[1].shape
    model.tensors[1] = Tensor(name, shape, values.astype("<f8").tobytes(), ggml_type=28)
    with open_model(model.write(tmp_path / "model.gguf")) as opened:
        weight = opened.weights[name]
        assert weight.format.name == "F32"
        assert weight.data.shape == (4 * shape[0],)
        np.testing.assert_array_equal(weight.to_f32(), values)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_sizes_cover_every_tensor_once(name: str, tmp_path: Path) -> None:
    inspection = inspect_model(TINY_MODELS[name]().write(tmp_path / "model.gguf"))
    assert inspection.spec is not None
    assert inspection.sizes is not None
    n_layers = len(inspection.spec.layers)
    kept = [t for t in inspection.tensors if not _is_draft(t.name, n_layers)]
    n_bytes = sum(tensor.n_bytes for tensor in kept)
    if name == "llama_dense":
        n_bytes -= 32  # rope_freqs belongs to no layer
    assert inspection.sizes.total_bytes == n_bytes
    assert sum(share.n_bytes for share in inspection.formats) >= n_bytes


def _is_draft(tensor: str, n_layers: int) -> bool:
    """Whether it belongs to a block behind the model's layers."""
    return tensor.startswith("blk.") and int(tensor.split(".")[1]) >= n_layers


def test_sizes_of_experts(tmp_path: Path) -> None:
    with open_model(quantized_olmoe("Q4_K").write(tmp_path / "model.gguf")) as model:
        sizes = model_sizes(model.spec, model.file.tensors)
    expert = 3 * 256 * 144
    assert sizes.layers[0].expert_bytes == expert
    assert sizes.expert_bytes == 2 * 8 * expert
    assert sizes.bytes_per_token == sizes.dense_bytes + 2 * 2 * expert
    assert sizes.kv_elems_per_token == 2 * 2 * 256


def test_inspection_of_the_bundled_model() -> None:
    inspection = inspect_model(BUNDLED_MODEL)
    assert inspection.reason == ""
    assert inspection.spec is not None
    assert inspection.spec.architecture == "olmoe"
    assert "Q4_K" in [share.format for share in inspection.formats]
    metadata = dict(inspection.metadata)
    assert metadata["tokenizer.ggml.tokens"].endswith("(12288)")
    assert all(len(value) < 500 and "\n" not in value for value in metadata.values())


def test_names_of_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31mname\r\n" + "x" * 1000
    tiny = TINY_MODELS["olmoe"]()
    tiny.metadata |= {"general.name": evil, "general.size_label": evil}
    with open_model(tiny.write(tmp_path / "evil.gguf")) as model:
        for text in (model.spec.name, model_type("olmoe", model.metadata, 15)):
            assert text.isprintable()
            assert "name" in text
            assert len(text) < 200
