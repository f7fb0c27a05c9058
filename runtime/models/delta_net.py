"""DeltaNetSpec: the mixer that keeps one matrix a head instead of keys and values.

Per value head, with the key head `value head % n_key_head`, q and k of length 1 after `l2`:

    M = M * exp(g)            g: log decay of each key channel, or of the whole head
    d = beta * (v - M^T k)
    M = M + k d^T
    o = M^T q / sqrt(head_dim)

M is [key channel][value channel].  The output is W_out concat(rms_norm(o) * gate_function(gate)).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from runtime.models.linear import Linear


class GateFunction(Enum):
    """What multiplies a mixer's normed output."""

    SILU = auto()
    SIGMOID = auto()


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated delta net, and KDA, whose decay has a value for each key channel.

    qkv          one or three Linears; their outputs one after another are q, k, v before the
                 convolution: silu(sum over taps of w[tap] * x[token - n_taps + 1 + tap])
    conv         one or three names of f32[channels][n_taps], together for all of q, k, v; the last
                 tap is the token's
    decay        one or two Linears, the second multiplies what the first gives; n_out: 1 or
                 head_dim values a value head
    decay_bias   f32[decay's n_out], added to them
    decay_rate   f32[n_value_head]: g = softplus(decay) * rate, or with a floor
    decay_floor  g = floor * sigmoid(-decay * rate)
    beta         n_value_head values, then a sigmoid
    gate         one or two Linears as in `decay`, n_value
    norm         f32[head_dim], of each head's o
    l2_eps       x / sqrt(sum(x^2) + eps)
    """

    n_key_head: int
    n_value_head: int
    head_dim: int
    n_taps: int
    qkv: tuple[Linear, ...]
    conv: tuple[str, ...]
    decay: tuple[Linear, ...]
    decay_bias: str
    decay_rate: str
    beta: Linear
    gate: tuple[Linear, ...]
    gate_function: GateFunction
    norm: str
    output: Linear
    l2_eps: float
    decay_floor: float | None = None

    @property
    def n_key(self) -> int:
        """Values of one token's keys."""
        return self.n_key_head * self.head_dim

    @property
    def n_value(self) -> int:
        """Values of one token's values."""
        return self.n_value_head * self.head_dim

    @property
    def n_channels(self) -> int:
        """Values of one token that the convolution runs over."""
        return 2 * self.n_key + self.n_value

    @property
    def state_bytes(self) -> int:
        """What a sequence leaves behind, whatever its length: taps, and a matrix a head; f32."""
        matrices = self.n_value_head * self.head_dim * self.head_dim
        return 4 * ((self.n_taps - 1) * self.n_channels + matrices)

    @property
    def cached(self) -> None:
        """Nothing that grows with the tokens."""
        return None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.qkv, *self.decay, self.beta, *self.gate, self.output)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        return (*self.conv, self.decay_bias, self.decay_rate, self.norm)
