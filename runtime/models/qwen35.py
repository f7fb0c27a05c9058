"""Qwen 3.5 to 3.8, dense: three gated delta nets, then gated attention, and so on."""

from __future__ import annotations

from collections.abc import Callable

from runtime.models.builder import SpecBuilder
from runtime.models.delta_net import GateFunction
from runtime.models.qwen_hybrid import gated_attention, gated_delta_net, is_recurrent
from runtime.models.spec import FeedForward, LayerSpec, ModelSpec


def build(builder: SpecBuilder) -> ModelSpec:
    """The spec of a `qwen35` file."""

    def dense(layer: int) -> FeedForward:
        return builder.dense(layer, builder.keys.count_of_layer("feed_forward_length", layer))

    return hybrid(builder, dense)


def hybrid(builder: SpecBuilder, feed_forward: Callable[[int], FeedForward]) -> ModelSpec:
    """The model with these feed-forward blocks."""
    layers = []
    for i in range(builder.n_layers):
        recurrent = is_recurrent(builder, i)
        layers.append(
            LayerSpec(
                mixer_norm=builder.tensor(f"blk.{i}.attn_norm.weight", builder.n_embd),
                mixer=gated_delta_net(builder, i, GateFunction.SILU)
                if recurrent
                else gated_attention(builder, i),
                feed_forward_norm=builder.tensor(
                    f"blk.{i}.post_attention_norm.weight", builder.n_embd
                ),
                feed_forward=feed_forward(i),
            )
        )
    return builder.model(layers, may_be_tied=True)
