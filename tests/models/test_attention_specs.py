"""Specs of models with windows, sinks, latent attention, leading dense layers, drafting blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.errors import CorruptModel, ModelError
from runtime.models import Model, open_model
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.rope import RopePairing
from runtime.models.sizes import model_sizes
from runtime.models.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    ModelSpec,
    MoeSpec,
    RouterScore,
)
from tests.support.gguf_writer import FLOAT64, Typed, f32_tensor
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS

CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("glm4moe", "nextn_predict_layers", 4, "the file has 4 blocks"),
    ("glm4moe", "nextn_predict_layers", -1, "at least 0"),
    ("glm4moe", "nextn_predict_layers", 2, r"block 2 does not draft: .* 'blk\.2\.nextn\.\*'"),
    ("glm4moe", "expert_weights_scale", "", "use a number"),
    ("glm4moe", "leading_dense_block_count", 0, r"'blk\.0\.ffn_gate_shexp\.weight' is missing"),
    ("glm4moe", "leading_dense_block_count", 2, r"'blk\.1\.ffn_gate\.weight' is missing"),
    ("glm4moe", "expert_shared_count", 2, r"'blk\.1\.ffn_gate_shexp\.weight' has the shape"),
    ("glm4moe", "expert_gating_func", 4, "use 0 to 3"),
    ("glm4moe", "expert_weights_norm", 1, "use a boolean"),
    ("gpt_oss", "attention.sliding_window", 0, "at least 1"),
    ("gpt_oss", "rope.freq_base_swa", 0.5, "above 1"),
    ("mimo2", "attention.sliding_window_pattern", [0, 1], "an entry for layer 2"),
    ("mimo2", "attention.sliding_window_pattern", [0, 1, 2, 0], "booleans, or 0 and 1"),
    ("mimo2", "attention.sliding_window_pattern", 1, "an entry for layer 0"),
    ("mimo2", "attention.value_scale", 0.0, "above 0"),
    ("mimo2", "attention.head_count_kv", 2, r"'blk\.0\.attn_qkv\.weight' has the shape"),
    ("deepseek2", "expert_group_count", 3, "does not divide 8 experts"),
    ("deepseek2", "expert_group_used_count", 5, "5 of 4 groups cannot have"),
    ("deepseek2", "expert_group_used_count", 1, "1 of 4 groups cannot have the 3 experts"),
    ("deepseek2", "attention.key_length_mla", 8, "rope alone takes 8"),
    ("deepseek2", "attention.key_length_mla", 32, r"'blk\.0\.attn_q_b\.weight' has the shape"),
    ("deepseek2", "attention.kv_lora_rank", 31, r"'blk\.0\.attn_kv_a_mqa\.weight' has the shape"),
    ("deepseek2", "attention.q_lora_rank", 47, r"'blk\.0\.attn_q_a_norm\.weight' has the shape"),
    ("deepseek2", "attention.value_length_mla", 16, r"'blk\.0\.attn_v_b\.weight' has the shape"),
    ("deepseek2", "rope.scaling.yarn_log_multiplier", -1.0, "above 0"),
    ("deepseek2", "rope.scaling.yarn_log_multiplier", Typed(FLOAT64, 1e300), "finite"),
    ("deepseek2", "rope.scaling.yarn_beta_slow", Typed(FLOAT64, 1e-308), "above 0"),
]


@pytest.mark.parametrize("name, key, value, match", CONTRADICTIONS)
def test_contradiction(name: str, key: str, value: Any, match: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]()
    model.metadata[f"{model.architecture}.{key}"] = value
    with pytest.raises(CorruptModel, match=match):
        open_model(model.write(tmp_path / "model.gguf"))


def spec_of(
    name: str, directory: Path, change: Callable[[TinyModel], None] | None = None
) -> ModelSpec:
    model = TINY_MODELS[name]()
    if change is not None:
        change(model)
    with open_model(model.write(directory / "model.gguf")) as opened:
        return opened.spec


def test_windows_sinks_and_experts_of_gpt_oss(tmp_path: Path) -> None:
    spec = spec_of("gpt_oss", tmp_path)
    attention = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, AttentionSpec) for mixer in attention)
    assert [mixer.window for mixer in attention] == [6, None, 6, None]
    assert [mixer.sinks for mixer in attention] == [f"blk.{i}.attn_sinks.weight" for i in range(4)]
    assert attention[0].output.bias == "blk.0.attn_output.bias"
    assert attention[0].rope == attention[1].rope
    assert attention[0].rope.magnitude == pytest.approx(1 + 0.1 * math.log(32))
    moe = spec.layers[1].feed_forward
    assert isinstance(moe, MoeSpec)
    assert (moe.activation, moe.activation_limit) == (Activation.SWIGLU_OAI, 7.0)
    assert moe.router.score is RouterScore.SOFTMAX_SELECTED
    assert [linear.bias for linear in moe.linears] == [
        f"blk.1.ffn_{part}.bias" for part in ("gate_exps", "up_exps", "gate_inp", "down_exps")
    ]


def test_windowed_layers_may_have_a_rope_of_their_own(tmp_path: Path) -> None:
    spec = spec_of("gpt_oss", tmp_path, lambda model: model.set(rope__freq_base_swa=1e4))
    bases = [layer.mixer.rope.base for layer in spec.layers]
    assert bases == [1e4, 150000.0, 1e4, 150000.0]


def test_layers_of_mimo2_differ(tmp_path: Path) -> None:
    spec = spec_of("mimo2", tmp_path)
    attention = [layer.mixer for layer in spec.layers]
    assert [mixer.window for mixer in attention] == [None, 7, 7, None]
    assert [mixer.n_head_kv for mixer in attention] == [1, 2, 2, 1]
    assert [mixer.rope.base for mixer in attention] == [5e6, 1e4, 1e4, 5e6]
    assert [mixer.sinks is None for mixer in attention] == [True, False, False, True]
    assert {(mixer.head_dim_k, mixer.head_dim_v) for mixer in attention} == {(24, 16)}
    assert {mixer.rope.n_rot for mixer in attention} == {8}
    assert attention[0].value_scale == pytest.approx(0.612)
    kinds = [type(layer.feed_forward) for layer in spec.layers]
    assert kinds == [DenseSpec, MoeSpec, MoeSpec, MoeSpec]


def test_experts_of_glm4moe(tmp_path: Path) -> None:
    spec = spec_of("glm4moe", tmp_path)
    assert len(spec.layers) == 3  # the fourth block drafts
    dense, moe = spec.layers[0].feed_forward, spec.layers[2].feed_forward
    assert isinstance(dense, DenseSpec)
    assert isinstance(moe, MoeSpec)
    assert moe.router.score is RouterScore.SIGMOID
    assert moe.router.renormalise
    assert moe.router.scale == pytest.approx(1.7)
    assert moe.router.selection_bias == "blk.2.exp_probs_b.bias"
    assert moe.shared is not None
    assert moe.shared.gate is None


def test_heads_without_norms_in_the_small_glm4moe(tmp_path: Path) -> None:
    def without_norms(model: TinyModel) -> None:
        model.tensors = [
            t for t in model.tensors if not t.name.endswith(("attn_q_norm.weight", "k_norm.weight"))
        ]

    spec = spec_of("glm4moe", tmp_path, without_norms)
    assert spec.layers[0].mixer.q_norm is None


def test_blocks_that_draft_are_absent_and_other_blocks_are_not(tmp_path: Path) -> None:
    model = TINY_MODELS["mimo2"]()
    opened = open_model(model.write(tmp_path / "model.gguf"))
    with opened:
        assert len(opened.spec.layers) == 4
        assert not any("blk.4." in linear.weight for linear in opened.spec.linears)
    model.set(nextn_predict_layers=2)
    with pytest.raises(ModelError, match=r"does not know: blk\.4\."):
        open_model(model.write(tmp_path / "model.gguf"))
    model.set(nextn_predict_layers=3)
    model.tensors.append(f32_tensor("blk.7.attn_norm.weight", np.ones(64, np.float32)))
    with pytest.raises(ModelError, match=r"does not know: blk\.7\.attn_norm"):
        open_model(model.write(tmp_path / "model.gguf"))


def latent_of(spec: ModelSpec) -> LatentAttentionSpec:
    mixer = spec.layers[1].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def moe_of(spec: ModelSpec) -> MoeSpec:
    moe = spec.layers[1].feed_forward
    assert isinstance(moe, MoeSpec)
    return moe


def test_latent_attention_of_deepseek2(tmp_path: Path) -> None:
    spec = spec_of("deepseek2", tmp_path)
    mixer, moe = latent_of(spec), moe_of(spec)
    sizes = (mixer.dim_nope, mixer.dim_rope, mixer.dim_latent, mixer.dim_v)
    assert sizes == (16, 8, 32, 24)
    assert [linear.n_out for linear in mixer.query] == [48, 96]
    assert (mixer.key_up.n_in, mixer.key_up.n_out, mixer.key_up.n_expert) == (16, 32, 4)
    assert (mixer.value_up.n_in, mixer.value_up.n_out) == (32, 24)
    assert mixer.rope is not None
    assert (mixer.rope.pairing, mixer.rope.magnitude) == (RopePairing.NORM, 1.0)
    assert mixer.scale == pytest.approx((1 + 0.1 * math.log(40)) ** 2 / math.sqrt(24))
    assert (moe.router.n_groups, moe.router.n_groups_used) == (4, 2)


def test_plain_queries_and_softmax_of_the_lite_kind(tmp_path: Path) -> None:
    spec = spec_of("deepseek2_lite", tmp_path)
    mixer, moe = latent_of(spec), moe_of(spec)
    assert [linear.weight for linear in mixer.query] == ["blk.1.attn_q.weight"]
    assert mixer.query_norm is None
    assert mixer.scale == pytest.approx((1 + 0.0707 * math.log(40)) ** 2 / math.sqrt(24))
    assert (moe.router.score, moe.router.renormalise) == (RouterScore.SOFTMAX, False)
    assert moe.shared is not None
    assert moe.shared.dense.n_ff == 64


def test_yarn_of_deepseek2_without_a_log_multiplier(tmp_path: Path) -> None:
    def plain(model: TinyModel) -> None:
        del model.metadata["deepseek2.rope.scaling.yarn_log_multiplier"]

    mixer = latent_of(spec_of("deepseek2", tmp_path, plain))
    assert mixer.rope is not None
    assert mixer.rope.magnitude == pytest.approx(1 + 0.1 * math.log(40))
    assert mixer.scale == pytest.approx((1 + 0.1 * math.log(40)) ** 2 / math.sqrt(24))


def test_no_yarn_keeps_the_usual_scale(tmp_path: Path) -> None:
    """GLM-4.7-Flash."""
    mixer = latent_of(
        spec_of("deepseek2", tmp_path, lambda model: model.set(rope__scaling__type="none"))
    )
    assert mixer.scale == pytest.approx(24**-0.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deepseek2", RouterScore.SIGMOID), ("deepseek2_lite", RouterScore.SOFTMAX)],
)
def test_old_files_do_not_say_how_experts_are_scored(
    name: str, expected: RouterScore, tmp_path: Path
) -> None:
    spec = spec_of(name, tmp_path, lambda model: model.set(expert_gating_func=0))
    assert moe_of(spec).router.score is expected


def test_a_conversion_without_absorbed_matrices_is_refused(tmp_path: Path) -> None:
    model = TINY_MODELS["deepseek2"]()
    model.tensors = [t for t in model.tensors if "attn_k_b" not in t.name]
    model.matrix("blk.0.attn_kv_b.weight", 32, 4 * 40)
    with pytest.raises(ModelError, match="take a newer conversion"):
        open_model(model.write(tmp_path / "model.gguf"))


def kv_elems(model: Model) -> list[int]:
    return [layer.kv_elems for layer in model_sizes(model.spec, model.file.tensors).layers]


@pytest.mark.parametrize(
    ("name", "expected"), [("deepseek2", [40] * 3), ("mimo2", [40, 80, 80, 40])]
)
def test_numbers_that_a_token_leaves_behind(name: str, expected: list[int], tmp_path: Path) -> None:
    with open_model(TINY_MODELS[name]().write(tmp_path / "model.gguf")) as model:
        assert kv_elems(model) == expected
