"""What differs between models, as data: an executor builds its kernels' arguments from this alone.

Tensors are named, never held: `Model.weights[name]` has the bytes. A new kind of mixer (sliding
windows with sinks, latent attention, a recurrence) is a new class in `Mixer`; nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from runtime.models.delta_net import DeltaNetSpec
from runtime.models.indexer import IndexerSpec
from runtime.models.kv_shape import KVShape
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.linear import Linear as Linear
from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.rope import RopeSpec
from runtime.models.streams import Streams


class QKNorm(Enum):
    """What the RMS norm of queries and keys, before rope, runs over."""

    NONE = auto()
    HEAD = auto()  # each head alone; weight f32[head_dim_k]
    ROW = auto()  # all heads of a token together; weight f32[n_heads * head_dim_k]


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention; query head h reads key/value head h // (n_head / n_head_kv).

    qkv          one or three Linears; their outputs one after another are Q, then K, then V
    output       from n_head * head_dim_v values back to n_embd
    scale        multiplies q . k
    rope         None: no position embedding
    window       a key is seen while 0 <= position_q - position_k < window; None: every earlier key
    sinks        name of f32[n_head]: exp(sink) joins each head's softmax denominator; None: none
    value_scale  multiplies the values
    gated        each head's queries are followed by head_dim_v gates (n_q + n_gate values in all,
                 then K and V): the attention's output is multiplied by their sigmoid
    indexer      chooses what a token reads; None: every key that the window lets it see
    """

    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    qkv: tuple[Linear, ...]
    output: Linear
    scale: float
    rope: RopeSpec | None
    qk_norm: QKNorm = QKNorm.NONE
    q_norm: str | None = None
    k_norm: str | None = None
    window: int | None = None
    sinks: str | None = None
    value_scale: float = 1.0
    gated: bool = False
    indexer: IndexerSpec | None = None

    @property
    def n_q(self) -> int:
        """Values of one token's queries."""
        return self.n_head * self.head_dim_k

    @property
    def n_gate(self) -> int:
        """Values of one token's output gates."""
        return self.n_head * self.head_dim_v if self.gated else 0

    @property
    def n_k(self) -> int:
        """Values of one token's keys."""
        return self.n_head_kv * self.head_dim_k

    @property
    def n_v(self) -> int:
        """Values of one token's values."""
        return self.n_head_kv * self.head_dim_v

    @property
    def cached(self) -> KVShape:
        n_index = 0 if self.indexer is None else self.indexer.n_cached
        return KVShape(self.n_head_kv, self.head_dim_k, self.head_dim_v, n_index)

    @property
    def state_bytes(self) -> int:
        """What a sequence leaves in a state beside the cache."""
        return 0 if self.indexer is None else self.indexer.state_bytes

    @property
    def linears(self) -> tuple[Linear, ...]:
        index = () if self.indexer is None else self.indexer.linears
        return (*self.qkv, *index, self.output)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        index = () if self.indexer is None else self.indexer.vectors
        return (*(name for name in (self.q_norm, self.k_norm, self.sinks) if name), *index)


Mixer = (
    AttentionSpec | LatentAttentionSpec | DeltaNetSpec
)  # the union of what mixes tokens; a new kind joins here


class Activation(Enum):
    """What joins the gate g and the up projection u."""

    SWIGLU = auto()  # silu(g) * u
    SWIGLU_CLAMPED = auto()  # g = min(g, limit), u = clamp(u, -limit, limit), then silu(g) * u
    SWIGLU_OAI = auto()  # clamped as above, then g * sigmoid(1.702 g) * (u + 1)


@dataclass(frozen=True)
class DenseSpec:
    """down(activation(gate(x), up(x))).

    gate_up  one or two Linears; their outputs one after another are gate, then up, `n_ff` each
    """

    n_ff: int
    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation = Activation.SWIGLU
    activation_limit: float = 0.0

    @property
    def input_linears(self) -> tuple[Linear, ...]:
        """Those that multiply the block's input x."""
        return self.gate_up

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.input_linears, self.down)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        return ()


class RouterScore(Enum):
    """How router logits become probabilities."""

    SOFTMAX = auto()  # over all experts
    SIGMOID = auto()
    SOFTMAX_SELECTED = auto()  # the raw logits select; softmax over the selected ones


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a token uses, and their weights.

    selection_bias  name of f32[n_expert], added for the choice only; None: none
    n_groups        experts form this many groups, of which the `n_groups_used` with the largest sum
                    of their two best selection scores are kept; 1: no grouping
    renormalise     divide the chosen probabilities by max(their sum, RENORMALISE_FLOOR)
    scale           multiplies the weights at the end
    """

    linear: Linear
    score: RouterScore
    renormalise: bool
    scale: float = 1.0
    selection_bias: str | None = None
    n_groups: int = 1
    n_groups_used: int = 1


RENORMALISE_FLOOR = 2.0**-14


@dataclass(frozen=True)
class SharedExpertSpec:
    """An expert that every token uses: y += sigmoid(gate(x)) * dense(x); no gate: dense(x)."""

    dense: DenseSpec
    gate: Linear | None = None

    @property
    def input_linears(self) -> tuple[Linear, ...]:
        """Those that multiply the input x."""
        own = self.dense.input_linears
        return own if self.gate is None else (*own, self.gate)


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts: y = sum over the chosen of weight * down(activation(gate(x), up(x))).

    gate_up, down  stacks of `n_expert` matrices, otherwise as in DenseSpec
    """

    n_expert: int
    n_used: int
    n_ff: int
    router: RouterSpec
    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation = Activation.SWIGLU
    activation_limit: float = 0.0
    shared: SharedExpertSpec | None = None

    @property
    def input_linears(self) -> tuple[Linear, ...]:
        """Those that multiply the block's input x."""
        own = (*self.gate_up, self.router.linear)
        return own if self.shared is None else (*own, *self.shared.input_linears)

    @property
    def linears(self) -> tuple[Linear, ...]:
        shared_down = () if self.shared is None else (self.shared.dense.down,)
        return (*self.input_linears, self.down, *shared_down)

    @property
    def expert_linears(self) -> tuple[Linear, ...]:
        """Those of which a token uses some experts only."""
        return (*self.gate_up, self.down)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        bias = self.router.selection_bias
        return () if bias is None else (bias,)


FeedForward = DenseSpec | MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """x += mixer(rms_norm(x, mixer_norm)); x += feed_forward(rms_norm(x, feed_forward_norm)).

    mixer_streams, feed_forward_streams   in a model with several residual streams, what each block
                                          reads of them, with its norm; None: there is one stream
    memory                                is added to the streams before all else
    """

    mixer_norm: str
    mixer: Mixer
    feed_forward_norm: str
    feed_forward: FeedForward
    mixer_streams: Streams | None = None
    feed_forward_streams: Streams | None = None
    memory: NgramMemorySpec | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        beside = tuple(linear for part in self._beside for linear in part.linears)
        return (*beside, *self.mixer.linears, *self.feed_forward.linears)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        norms = (self.mixer_norm, self.feed_forward_norm)
        beside = tuple(name for part in self._beside for name in part.vectors)
        return (*norms, *beside, *self.mixer.vectors, *self.feed_forward.vectors)

    @property
    def state_bytes(self) -> int:
        """What a sequence leaves behind beside its keys and values: the mixer's, the memory's."""
        memory = 0 if self.memory is None else self.memory.state_bytes
        return self.mixer.state_bytes + memory

    @property
    def _beside(self) -> tuple[Streams | NgramMemorySpec, ...]:
        """The parts beside the two blocks."""
        parts = (self.memory, self.mixer_streams, self.feed_forward_streams)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding row, layers, rms_norm(output_norm), output.

    n_ctx_train  context the model was trained for
    eps          of every RMS norm: x / sqrt(mean(x^2) + eps) * weight
    n_stream     residual streams; output_streams: what the output reads of several
    """

    architecture: str
    name: str
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    eps: float
    token_embedding: str
    layers: tuple[LayerSpec, ...]
    output_norm: str
    output: Linear
    n_stream: int = 1
    output_streams: Streams | None = None

    @property
    def output_is_tied(self) -> bool:
        """Whether the output matrix is the embedding table."""
        return self.output.weight == self.token_embedding

    @property
    def n_expert_max(self) -> int:
        """Experts of the layer that has most; 0 in a dense model."""
        return max((block.n_expert for _, block in self.moe_layers), default=0)

    @cached_property
    def moe_layers(self) -> tuple[tuple[int, MoeSpec], ...]:
        """(layer number, block) of the layers with routed experts."""
        return tuple(
            (index, layer.feed_forward)
            for index, layer in enumerate(self.layers)
            if isinstance(layer.feed_forward, MoeSpec)
        )

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence; 0: no layer is recurrent."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that is multiplied."""
        streams = () if self.output_streams is None else self.output_streams.linears
        layers = (linear for layer in self.layers for linear in layer.linears)
        return (*layers, *streams, self.output)

    @property
    def n_previous(self) -> int:
        """Tokens before a token that its layers look at by their ids."""
        return max((memory.n_gram - 1 for memory in self.memories), default=0)

    @property
    def memory_tables(self) -> tuple[str, ...]:
        """Tensors beside the embedding of which a token reads a few rows."""
        return tuple(memory.table for memory in self.memories)

    @property
    def memories(self) -> list[NgramMemorySpec]:
        """The n-gram memories of all layers, in their order."""
        return [memory for layer in self.layers if (memory := layer.memory) is not None]
