"""MiMo-V2: windows with sinks between full layers, keys wider than values, values scaled."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import AttentionSpec, FeedForward, LayerSpec, ModelSpec, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `mimo2` file; a layer without a router is dense."""
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=_attention(builder, i),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=_feed_forward(builder, i),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=False)


def _attention(builder: SpecBuilder, layer: int) -> AttentionSpec:
    keys = builder.keys
    windowed = keys.flag_of_layer("attention.sliding_window_pattern", layer)
    return builder.attention(
        layer,
        RopePairing.NEOX,
        base_key="rope.freq_base_swa" if windowed else "rope.freq_base",
        window=keys.count("attention.sliding_window") if windowed else None,
        may_have_sinks=True,
        value_scale=keys.positive("attention.value_scale", 1.0),
    )


def _feed_forward(builder: SpecBuilder, layer: int) -> FeedForward:
    keys = builder.keys
    if not builder.has(f"blk.{layer}.ffn_gate_inp.weight"):
        return builder.dense(layer, keys.count_of_layer("feed_forward_length", layer))
    n_ff = keys.count("expert_feed_forward_length")
    return builder.moe(layer, n_ff, RouterScore.SIGMOID, renormalise=True)
