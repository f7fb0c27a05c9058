"""Qwen3 MoE: queries and keys are normed head by head; expert weights are renormalised."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import LayerSpec, ModelSpec, QKNorm, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `qwen3moe` file."""
    n_ff = builder.keys.count("expert_feed_forward_length")
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=builder.attention(i, RopePairing.NEOX, QKNorm.HEAD),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=builder.moe(i, n_ff, RouterScore.SOFTMAX, renormalise=True),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=True)
