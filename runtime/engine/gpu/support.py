"""What the kernels can compute: the reasons why a model has to stay on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ops.gpu.attention_shape import MAX_DIM_V
from ops.gpu.kv_layout import KEY_DIMS, VALUE_DIMS
from ops.gpu.norm import MAX_N
from ops.gpu.norm import VALUES as NORM_VALUES
from ops.gpu.router import MAX_EXPERTS, MAX_GROUPS, MAX_USED
from ops.gpu.row_launch import GPU_FORMATS
from runtime.engine.gpu.delta_net_launches import delta_net_obstacles
from runtime.engine.gpu.indexer_launches import indexer_obstacles
from runtime.engine.gpu.memory_launches import memory_obstacles
from runtime.engine.gpu.stream_launches import stream_obstacles
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.model import Model
from runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

ROW_VALUES = 16
"""Rows of f32 values with nothing between them begin at multiples of 64 bytes."""

LOADED_VALUES = 4
"""Of f32 activations at once: every row of them begins at a multiple of 16 bytes."""

COMPUTED: Mapping[type, tuple[str, ...]] = {
    ModelSpec: ("n_stream", "output_streams"),
    LayerSpec: ("mixer_streams", "feed_forward_streams", "memory"),
    AttentionSpec: (
        "qk_norm", "q_norm", "k_norm", "window", "sinks", "value_scale", "gated", "indexer",
    ),
    LatentAttentionSpec: ("query_norm", "indexer", "reads_as_before"),
    DeltaNetSpec: ("decay_floor",),
    DenseSpec: ("activation", "activation_limit"),
    MoeSpec: ("activation", "activation_limit", "shared"),
    RouterSpec: ("scale", "selection_bias", "n_groups", "n_groups_used"),
    SharedExpertSpec: ("gate",),
}  # fmt: skip
"""Optional parts that the launches know; whatever else a spec has is an obstacle, not ignored."""


def obstacles(model: Model) -> list[str]:
    """Why the GPU cannot compute the model, each reason once; empty: it can."""
    return list(dict.fromkeys(_obstacles(model)))


def _obstacles(model: Model) -> Iterator[str]:
    spec = model.spec
    yield from _unknown_parts(spec)
    yield from stream_obstacles(model)
    yield from memory_obstacles(model)
    if spec.n_embd % ROW_VALUES or spec.n_embd > MAX_N:
        yield f"rows of {spec.n_embd} values"
    for tensor in (spec.token_embedding, *(linear.weight for linear in spec.linears)):
        name = model.weights[tensor].format.name
        if name not in GPU_FORMATS:
            yield f"matrices of format {name}"
    for linear in spec.linears:
        if linear.n_in % LOADED_VALUES:
            yield f"products of {linear.n_in} values"
    for layer in spec.layers:
        yield from _unknown_parts(layer)
        yield from _mixer_obstacles(layer.mixer)
        yield from _feed_forward_obstacles(layer.feed_forward)


def _unknown_parts(spec: Any) -> Iterator[str]:
    """Parts that differ from their default and that no launch computes."""
    known = COMPUTED[type(spec)]
    for part in fields(spec):
        if part.default is MISSING or part.name in known:
            continue
        if getattr(spec, part.name) != part.default:
            yield f"{part.name} of {type(spec).__name__}"


def _mixer_obstacles(mixer: Mixer) -> Iterator[str]:
    known = MIXERS.get(type(mixer))
    if known is None:
        yield f"layers of the kind {type(mixer).__name__.removesuffix('Spec')}"
        return
    yield from _unknown_parts(mixer)
    yield from known(mixer)
    indexer = getattr(mixer, "indexer", None)
    if indexer is not None:
        yield from indexer_obstacles(indexer)


def _attention_obstacles(mixer: AttentionSpec) -> Iterator[str]:
    yield from _head_obstacles(mixer.head_dim_k, mixer.head_dim_v)
    if mixer.n_head * mixer.head_dim_v % ROW_VALUES:
        yield f"attention of {mixer.n_head} heads of {mixer.head_dim_v} values"


def _latent_obstacles(mixer: LatentAttentionSpec) -> Iterator[str]:
    yield from _head_obstacles(mixer.dim_k, mixer.dim_latent)
    if mixer.dim_nope % ROW_VALUES or mixer.dim_rope % KEY_DIMS:
        yield f"queries of {mixer.dim_nope} and {mixer.dim_rope} values"
    if mixer.n_head * mixer.dim_v % ROW_VALUES:
        yield f"latent attention of {mixer.n_head} heads of {mixer.dim_v} values"
    if mixer.query_norm is not None and mixer.query[0].n_out % NORM_VALUES:
        yield f"narrow queries of {mixer.query[0].n_out} values"


def _head_obstacles(dim_k: int, dim_v: int) -> Iterator[str]:
    if dim_k % KEY_DIMS:
        yield f"keys of {dim_k} values"
    if dim_v % VALUE_DIMS or dim_v > MAX_DIM_V:
        yield f"attention heads of {dim_v} values"


def _feed_forward_obstacles(block: FeedForward) -> Iterator[str]:
    yield from _unknown_parts(block)
    if isinstance(block, DenseSpec):
        return
    router = block.router
    yield from _unknown_parts(router)
    if block.shared is not None:
        yield from _unknown_parts(block.shared)
        yield from _unknown_parts(block.shared.dense)
    if block.n_expert > MAX_EXPERTS or block.n_used > MAX_USED or router.n_groups > MAX_GROUPS:
        yield f"{block.n_used} of {block.n_expert} experts in {router.n_groups} groups"
    gate, up = block.gate_up[0], block.gate_up[-1]
    if gate is up and (gate.bias is not None or gate.scale is not None):
        yield "experts whose gate and up matrices are one, with biases or scales"


MIXERS: Mapping[type, Callable[[Any], Iterator[str]]] = {
    AttentionSpec: _attention_obstacles,
    LatentAttentionSpec: _latent_obstacles,
    DeltaNetSpec: delta_net_obstacles,
}
"""The kinds of mixers that have launches, and what stands in the way of one."""
