"""GLM-4.5: rope on half of each head, dense layers first, experts chosen with a bias."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import FeedForward, LayerSpec, ModelSpec, QKNorm, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `glm4moe` file; the large models norm queries and keys, the small do not."""
    normed = builder.has("blk.0.attn_q_norm.weight")
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=builder.attention(i, RopePairing.NEOX, QKNorm.HEAD if normed else QKNorm.NONE),
            feed_forward_norm=builder.tensor(f"blk.{i}.post_attention_norm.weight", builder.n_embd),
            feed_forward=_feed_forward(builder, i),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=True)


def _feed_forward(builder: SpecBuilder, layer: int) -> FeedForward:
    keys = builder.keys
    if layer < keys.count("leading_dense_block_count", 0, at_least=0):
        return builder.dense(layer, keys.count_of_layer("feed_forward_length", layer))
    n_ff = keys.count("expert_feed_forward_length")
    return builder.moe(
        layer,
        n_ff,
        builder.router_score(RouterScore.SIGMOID),
        renormalise=keys.flag("expert_weights_norm", False),
        shared=builder.ungated_shared_expert(layer, n_ff),
    )
