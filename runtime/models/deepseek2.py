"""DeepSeek-V2 and V3, GLM-4.7-Flash: latent attention, dense layers first, shared experts."""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.errors import ModelError
from runtime.models.builder import SpecBuilder
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.rope import RopePairing
from runtime.models.spec import FeedForward, LayerSpec, ModelSpec, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `deepseek2` file.

    Raises: ModelError for files from before the key and value matrices were stored apart.
    """
    if builder.has("blk.0.attn_kv_b.weight") and not builder.has("blk.0.attn_k_b.weight"):
        raise ModelError(
            f"{builder.path}: the file has attn_kv_b in place of attn_k_b and attn_v_b: "
            "it was converted before 2025-04, take a newer conversion"
        )
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=_attention(builder, i),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=_feed_forward(builder, i),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=True)


def _attention(builder: SpecBuilder, layer: int) -> LatentAttentionSpec:
    """YaRN sharpens the scores by the square of its magnitude.

    With the key `yarn_log_multiplier` rope itself keeps the length of what it turns.
    """
    keys = builder.keys
    rope = builder.rope(RopePairing.NORM, keys.count("rope.dimension_count"))
    if rope.yarn is None:
        return builder.latent_attention(layer, rope)
    multiplier = 0.1
    if keys.has("rope.scaling.yarn_log_multiplier"):
        multiplier = keys.positive("rope.scaling.yarn_log_multiplier")
        rope = replace(rope, magnitude=1.0)
    sharper = 1.0 + multiplier * math.log(max(rope.factor, 1.0))
    return builder.latent_attention(layer, rope, sharper**2)


def _feed_forward(builder: SpecBuilder, layer: int) -> FeedForward:
    """Files of before the key `expert_gating_func` have the softmax, unless a bias chooses."""
    keys = builder.keys
    if layer < keys.count("leading_dense_block_count", 0, at_least=0):
        return builder.dense(layer, keys.count_of_layer("feed_forward_length", layer))
    biased = builder.has(f"blk.{layer}.exp_probs_b.bias")
    n_ff = keys.count("expert_feed_forward_length")
    return builder.moe(
        layer,
        n_ff,
        builder.router_score(RouterScore.SIGMOID if biased else RouterScore.SOFTMAX),
        renormalise=keys.flag("expert_weights_norm", False),
        shared=builder.ungated_shared_expert(layer, n_ff),
    )
