"""OLMoE: queries and keys are normed over the whole row; expert weights are not renormalised."""

from __future__ import annotations

from functools import partial

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import LayerSpec, ModelSpec, QKNorm, RouterScore


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of an `olmoe` file; experts are `feed_forward_length` wide."""
    n_ff = partial(builder.keys.count_of_layer, "feed_forward_length")
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=builder.attention(i, RopePairing.NEOX, QKNorm.ROW),
            feed_forward_norm=builder.tensor(f"blk.{i}.ffn_norm.weight", builder.n_embd),
            feed_forward=builder.moe(i, n_ff(i), RouterScore.SOFTMAX, renormalise=False),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=False)
