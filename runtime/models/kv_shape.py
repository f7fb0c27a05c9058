"""KVShape: what one token leaves in the attention cache of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVShape:
    """n_head rows of a key of dim_k numbers and a value of dim_v numbers.

    dim_v    0: the values are the first numbers of the keys, which are kept once
    n_index  its share of the keys by which blocks of tokens are chosen, always f32; 0: none are
    """

    n_head: int
    dim_k: int
    dim_v: int
    n_index: int = 0

    @property
    def n_elems(self) -> int:
        """Numbers of one token."""
        return self.n_head * (self.dim_k + self.dim_v) + self.n_index
