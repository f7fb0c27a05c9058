"""Qwen2 MoE: biased projections, and a shared expert behind a gate of its own."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import LayerSpec, ModelSpec, RouterScore, SharedExpertSpec


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `qwen2moe` file; expert weights are not renormalised."""
    n_ff = builder.keys.count("expert_feed_forward_length")
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=builder.attention(i, RopePairing.NEOX),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=builder.moe(
                i, n_ff, RouterScore.SOFTMAX, renormalise=False, shared=_shared_expert(builder, i)
            ),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=False)


def _shared_expert(builder: SpecBuilder, layer: int) -> SharedExpertSpec:
    n_ff = builder.keys.count("expert_shared_feed_forward_length")
    return SharedExpertSpec(
        dense=builder.dense(layer, n_ff, "_shexp"),
        gate=builder.linear(f"blk.{layer}.ffn_gate_inp_shexp", builder.n_embd, 1),
    )
