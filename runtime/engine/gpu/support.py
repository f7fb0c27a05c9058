"""What the kernels can compute: the reasons why a model has to stay on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ops.gpu.attention import PROMPT_ROWS
from ops.gpu.kv_layout import VALUE_DIMS
from ops.gpu.norm import MAX_N
from ops.gpu.router import MAX_EXPERTS, MAX_GROUPS, MAX_USED
from ops.gpu.row_launch import GPU_FORMATS
from runtime.models.model import Model
from runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    SharedExpertSpec,
)

ROW_VALUES = 16
"""Rows of f32 values with nothing between them begin at multiples of 64 bytes."""

COMPUTED: Mapping[type, tuple[str, ...]] = {
    ModelSpec: (),
    LayerSpec: (),
    AttentionSpec: (
        "qk_norm", "q_norm", "k_norm", "window", "sinks", "value_scale", "gated",
    ),
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
    if spec.n_embd % ROW_VALUES or spec.n_embd > MAX_N:
        yield f"rows of {spec.n_embd} values"
    for tensor in (spec.token_embedding, *(linear.weight for linear in spec.linears)):
        name = model.weights[tensor].format.name
        if name not in GPU_FORMATS:
            yield f"matrices of format {name}"
    for layer in spec.layers:
        yield from _unknown_parts(layer)
        yield from _mixer_obstacles(layer)
        yield from _feed_forward_obstacles(layer.feed_forward)


def _unknown_parts(spec: Any) -> Iterator[str]:
    """Parts that differ from their default and that no launch computes."""
    known = COMPUTED[type(spec)]
    for part in fields(spec):
        if part.default is MISSING or part.name in known:
            continue
        if getattr(spec, part.name) != part.default:
            yield f"{part.name} of {type(spec).__name__}"


def _mixer_obstacles(layer: LayerSpec) -> Iterator[str]:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec):
        yield f"layers of the kind {type(mixer).__name__.removesuffix('Spec')}"
        return
    yield from _unknown_parts(mixer)
    for dim in (mixer.head_dim_k, mixer.head_dim_v):
        if dim % VALUE_DIMS:
            yield f"attention heads of {dim} values"
    if mixer.n_head // mixer.n_head_kv > PROMPT_ROWS:
        yield f"{mixer.n_head} heads that share {mixer.n_head_kv}"


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
