"""How many bytes the parts of a model take: what an expert costs to hold, to move and to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.models.gguf_header import TensorInfo
from runtime.models.linear import Linear
from runtime.models.spec import LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True)
class LayerSizes:
    """One layer.

    n_expert, n_used  0 in a dense layer
    expert_bytes      one routed expert: gate, up and down
    rest_bytes        everything else, read for every token
    kv_elems          key and value numbers a token leaves behind
    state_bytes       recurrent state of a sequence, whatever its length
    """

    n_expert: int
    n_used: int
    expert_bytes: int
    rest_bytes: int
    kv_elems: int
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """All layers, and what lies outside them.

    embedding_bytes  the embedding table, of which a token reads one row
    output_bytes     output norm and matrix (a tied matrix counts here for reading only)
    memory_bytes     other tables of which a token reads a few rows, from the map
    """

    layers: tuple[LayerSizes, ...]
    embedding_bytes: int
    output_bytes: int
    output_is_tied: bool
    memory_bytes: int = 0

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
        return self.expert_bytes + self.dense_bytes + held + self.memory_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read to generate one token."""
        routed = sum(layer.n_used * layer.expert_bytes for layer in self.layers)
        return routed + self.dense_bytes

    @property
    def kv_elems_per_token(self) -> int:
        return sum(layer.kv_elems for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence."""
        return sum(layer.state_bytes for layer in self.layers)


def model_sizes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSizes:
    """The sizes of the model described by `spec`."""
    streams = () if spec.output_streams is None else spec.output_streams.linears
    output = [spec.output_norm, *_names([*streams, spec.output])]
    return ModelSizes(
        layers=tuple(_layer_sizes(layer, tensors) for layer in spec.layers),
        embedding_bytes=tensors[spec.token_embedding].n_bytes,
        output_bytes=_n_bytes(output, tensors),
        output_is_tied=spec.output_is_tied,
        memory_bytes=_n_bytes(spec.memory_tables, tensors),
    )


def _layer_sizes(layer: LayerSpec, tensors: Mapping[str, TensorInfo]) -> LayerSizes:
    feed_forward, cached = layer.feed_forward, layer.mixer.cached
    n_expert = n_used = expert_bytes = 0
    experts: tuple[Linear, ...] = ()
    if isinstance(feed_forward, MoeSpec):
        n_expert, n_used = feed_forward.n_expert, feed_forward.n_used
        experts = feed_forward.expert_linears
        expert_bytes = _n_bytes(_names(experts), tensors) // n_expert
    rest = [linear for linear in layer.linears if linear not in experts]
    return LayerSizes(
        n_expert=n_expert,
        n_used=n_used,
        expert_bytes=expert_bytes,
        rest_bytes=_n_bytes([*_names(rest), *layer.vectors], tensors),
        kv_elems=0 if cached is None else cached.n_elems,
        state_bytes=layer.state_bytes,
    )


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
