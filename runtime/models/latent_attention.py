"""LatentAttentionSpec: attention whose heads read one narrow cached row of each token."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.models.indexer import IndexerSpec
from runtime.models.kv_shape import KVShape
from runtime.models.linear import Linear
from runtime.models.rope import RopeSpec


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention in its absorbed form.

    Per token, c = latent(x): its first dim_latent values, RMS-normed with `latent_norm`, are the
    latent; the last dim_rope are a key part that rope rotates.  key = value = [latent | key part],
    of which a value has the first dim_latent only.  Per head h, q = query(x)[h] is dim_nope values
    and dim_rope values that rope rotates; query = [key_up[h] (scale * first) | scale * rotated].
    Then output(concat of value_up[h] (softmax(query . keys) values)).

    query       one Linear to n_head * (dim_nope + dim_rope) values, or two with a norm between
    query_norm  weight f32 of the RMS norm between the two
    key_up      n_head matrices, dim_nope -> dim_latent
    value_up    n_head matrices, dim_latent -> dim_v
    rope        None: no position embedding, dim_rope may be 0
    indexer     chooses what a token reads, from queries of the normed first part of `query`; None:
                every earlier token, or
    reads_as_before   what the layer before it that has an indexer chose
    """

    n_head: int
    dim_nope: int
    dim_rope: int
    dim_latent: int
    dim_v: int
    query: tuple[Linear, ...]
    latent: Linear
    latent_norm: str
    key_up: Linear
    value_up: Linear
    output: Linear
    scale: float
    rope: RopeSpec | None
    query_norm: str | None = None
    indexer: IndexerSpec | None = None
    reads_as_before: bool = False

    @property
    def dim_k(self) -> int:
        """Values of a cached key."""
        return self.dim_latent + self.dim_rope

    @property
    def cached(self) -> KVShape:
        n_index = 0 if self.indexer is None else self.indexer.n_cached
        return KVShape(1, self.dim_k, 0, n_index)

    @property
    def state_bytes(self) -> int:
        """What a sequence leaves in a state beside the cache."""
        return 0 if self.indexer is None else self.indexer.state_bytes

    @property
    def linears(self) -> tuple[Linear, ...]:
        index = () if self.indexer is None else self.indexer.linears
        return (*self.query, self.latent, *index, self.key_up, self.value_up, self.output)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices."""
        norm = () if self.query_norm is None else (self.query_norm,)
        index = () if self.indexer is None else self.indexer.vectors
        return (*norm, self.latent_norm, *index)
