"""Llama and Mixtral: rope turns neighbouring dimensions; a layer with a router has experts."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import FeedForward, LayerSpec, ModelSpec, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `llama` file, dense or MoE."""
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=builder.attention(i, RopePairing.NORM),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=_feed_forward(builder, i),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=True)


def _feed_forward(builder: SpecBuilder, layer: int) -> FeedForward:
    n_ff = builder.keys.count_of_layer("feed_forward_length", layer)
    if builder.has(f"blk.{layer}.ffn_gate_inp.weight"):
        return builder.moe(layer, n_ff, RouterScore.SOFTMAX, renormalise=True)
    return builder.dense(layer, n_ff)
