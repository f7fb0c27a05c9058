"""IndexerSpec: attention that reads only the blocks of tokens that score best for a query.

Blocks are `block` consecutive tokens from the start of the sequence.  A block can be chosen once it
is complete; a token reads the `n_best` best complete blocks up to its own position, and the tokens
after the last complete one.  With as many blocks or fewer that is every earlier token.

score(token, block) = scale * sum over heads of weight[head] * max(0, query[head] . block's key)
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.models.linear import Linear
from runtime.models.rope import RopeSpec


@dataclass(frozen=True)
class IndexerSpec:
    """How blocks are scored.

    query       n_head * head_dim values, of the layer's normed input, or in latent attention of the
                normed query rank
    query_norm  f32[head_dim] of an RMS norm of each head; None: none
    key         head_dim values a token, of the layer's normed input
    key_norm    f32[head_dim]; with key_bias a layer norm of each token's key, with `key_eps`;
                without, an RMS norm of the block's
    pool_gate   head_dim values a token: a block's key is the sum of its tokens' keys times the
                softmax over them, channel by channel, of gate + pool_bias[place in the
                block][channel]; None: their mean
    weight      n_head values a token; None: all 1
    rope        of queries, and of keys at the first position of their block; None: none
    """

    n_head: int
    head_dim: int
    block: int
    n_best: int
    query: Linear
    key: Linear
    key_norm: str
    scale: float
    query_norm: str | None = None
    key_bias: str | None = None
    key_eps: float = 0.0
    pool_gate: Linear | None = None
    pool_bias: str | None = None
    weight: Linear | None = None
    rope: RopeSpec | None = None

    @property
    def state_bytes(self) -> int:
        """Keys, and gates, of the block that is not complete; f32."""
        return 4 * self.block * self.head_dim * (1 if self.pool_gate is None else 2)

    @property
    def n_cached(self) -> int:
        """A token's share of the blocks' keys, f32 numbers."""
        return self.head_dim // self.block

    @property
    def linears(self) -> tuple[Linear, ...]:
        optional = (self.pool_gate, self.weight)
        return (self.query, self.key, *(linear for linear in optional if linear is not None))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        optional = (self.query_norm, self.key_bias, self.pool_bias)
        return (self.key_norm, *(name for name in optional if name is not None))
