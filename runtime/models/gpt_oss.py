"""gpt-oss: attention sinks, every other layer a sliding window, experts with biases."""

from __future__ import annotations

from runtime.models.builder import SpecBuilder
from runtime.models.rope import RopePairing
from runtime.models.spec import Activation, AttentionSpec, LayerSpec, ModelSpec, RouterScore

SWIGLU_LIMIT = 7.0


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `gpt-oss` file; the norm of the experts' input has another name there."""
    n_ff = builder.keys.count("expert_feed_forward_length")
    layers = [
        LayerSpec(
            mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
            mixer=_attention(builder, i),
            feed_forward_norm=builder.tensor(f"blk.{i}.post_attention_norm.weight", builder.n_embd),
            feed_forward=builder.moe(
                i,
                n_ff,
                RouterScore.SOFTMAX_SELECTED,
                renormalise=False,
                activation=Activation.SWIGLU_OAI,
                limit=SWIGLU_LIMIT,
            ),
        )
        for i in range(builder.n_layers)
    ]
    return builder.model(layers, may_be_tied=False)


def _attention(builder: SpecBuilder, layer: int) -> AttentionSpec:
    """The even layers have the window."""
    if layer % 2:
        return builder.attention(layer, RopePairing.NEOX, may_have_sinks=True)
    return builder.attention(
        layer,
        RopePairing.NEOX,
        base_key="rope.freq_base_swa",
        window=builder.keys.count("attention.sliding_window"),
        may_have_sinks=True,
    )
