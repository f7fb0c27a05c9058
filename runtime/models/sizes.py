"""How many bytes the parts of a model take: what an expert costs to hold, to move and to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.models.gguf_header import TensorInfo
from runtime.models.spec import DenseSpec, LayerSpec, Linear, ModelSpec, MoeSpec


@dataclass(frozen=True)
class LayerSizes:
    """One layer.

    n_expert, n_used  0 in a dense layer
    expert_bytes      one routed expert: gate, up and down
    rest_bytes        everything else, read for every token
    kv_elems          key and value numbers a token leaves behind
    """

    n_expert: int
    n_used: int
    expert_bytes: int
    rest_bytes: int
    kv_elems: int


@dataclass(frozen=True)
class ModelSizes:
    """All layers, and what lies outside them.

    embedding_bytes  the embedding table, of which a token reads one row
    output_bytes     output norm and matrix (a tied matrix counts here for reading only)
    """

    layers: tuple[LayerSizes, ...]
    embedding_bytes: int
    output_bytes: int
    output_is_tied: bool

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return sum(layer.n_expert * layer.expert_bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """What every token reads: all layers without their routed experts, and the output."""
        return sum(layer.rest_bytes for layer in self.layers) + self.output_bytes

    @property
    def total_bytes(self) -> int:
        held = 0 if self.output_is_tied else self.embedding_bytes
        return self.expert_bytes + self.dense_bytes + held

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read to generate one token."""
        routed = sum(layer.n_used * layer.expert_bytes for layer in self.layers)
        return routed + self.dense_bytes

    @property
    def kv_elems_per_token(self) -> int:
        return sum(layer.kv_elems for layer in self.layers)


def model_sizes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSizes:
    """The sizes of the model described by `spec`."""
    output = [spec.output_norm, *_names([spec.output])]
    return ModelSizes(
        layers=tuple(_layer_sizes(layer, tensors) for layer in spec.layers),
        embedding_bytes=tensors[spec.token_embedding].n_bytes,
        output_bytes=_n_bytes(output, tensors),
        output_is_tied=spec.output_is_tied,
    )


def _layer_sizes(layer: LayerSpec, tensors: Mapping[str, TensorInfo]) -> LayerSizes:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    rest = [layer.mixer_norm, layer.feed_forward_norm, *_names([*mixer.qkv, mixer.output])]
    rest += [name for name in (mixer.q_norm, mixer.k_norm, mixer.sinks) if name]
    n_expert = n_used = expert_bytes = 0
    if isinstance(feed_forward, MoeSpec):
        n_expert, n_used = feed_forward.n_expert, feed_forward.n_used
        experts = _names([*feed_forward.gate_up, feed_forward.down])
        expert_bytes = _n_bytes(experts, tensors) // n_expert
        rest += _names([feed_forward.router.linear])
        if feed_forward.router.selection_bias:
            rest.append(feed_forward.router.selection_bias)
        if feed_forward.shared is not None:
            rest += _dense_names(feed_forward.shared.dense)
            rest += _names([feed_forward.shared.gate] if feed_forward.shared.gate else [])
    else:
        rest += _dense_names(feed_forward)
    return LayerSizes(
        n_expert=n_expert,
        n_used=n_used,
        expert_bytes=expert_bytes,
        rest_bytes=_n_bytes(rest, tensors),
        kv_elems=mixer.n_k + mixer.n_v,
    )


def _dense_names(dense: DenseSpec) -> list[str]:
    return _names([*dense.gate_up, dense.down])


def _names(linears: Iterable[Linear]) -> list[str]:
    """Every tensor of these."""
    return [
        name
        for linear in linears
        for name in (linear.weight, linear.bias, linear.scale)
        if name is not None
    ]


def _n_bytes(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> int:
    return sum(tensors[name].n_bytes for name in names)
