"""NgramMemorySpec: rows of a large table, found by hashing a token and those before it.

For every length n from 2 to n_gram and head h of that length, with the contexts c[0] (the token),
c[1], ... (the tokens before): row = (XOR over j < n of c[j] * multipliers[j] mod 2^64) mod sizes[i]
+ offsets[i], i counting heads of all lengths.  A token that does not exist, and every one at or
before an `end_token` among those before, counts as `end_token`.

With e = the rows one after another and r the residual streams, all norms RMS norms of each stream:
d[s] = key_norm(key(e))[s] . query_norm(r)[s] / sqrt(n_embd)
v[s] = sigmoid(sign(d[s]) * sqrt(max(|d[s]|, 1e-6))) * value(e)
r += v + silu(convolution of conv_norm(v)), n_taps taps, n_gram tokens apart
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.models.linear import Linear

I64 = NDArray[np.int64]

FEW_TOKENS = 8
"""Of a step of generated tokens, say."""

WORD = (1 << 64) - 1
"""What is left of numbers modulo 2^64."""


@dataclass(frozen=True)
class NgramMemorySpec:
    """The table and what is done with its rows.

    table                    [row_dim, rows], gathered row by row, never multiplied
    key, value               from n_embd; to n_stream * n_embd, and to n_embd
    key_norm, .., conv_norm  f32[n_stream][n_embd]
    conv                     f32[n_stream * n_embd][n_taps]
    """

    table: str
    row_dim: int
    n_gram: int
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    end_token: int
    key: Linear
    value: Linear
    key_norm: str
    query_norm: str
    conv_norm: str
    conv: str
    n_taps: int

    @property
    def state_bytes(self) -> int:
        """The inputs of the convolution that later tokens read; f32."""
        return 4 * (self.n_taps - 1) * self.n_gram * self.key.n_out

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.key, self.value)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the tensors that are no matrices; not the table."""
        return (self.key_norm, self.query_norm, self.conv_norm, self.conv)

    def rows(self, contexts: NDArray[np.int32]) -> I64:
        """Table rows i64[n_tokens, n_heads] of contexts i32[n_tokens, n_gram].

        contexts: the token, the one before, ...; -1: there is none
        """
        if len(contexts) <= FEW_TOKENS:
            few = [self._rows_of(context) for context in contexts.tolist()]
            return np.array(few, np.int64).reshape(len(few), len(self.sizes))
        ended = np.zeros(len(contexts), bool)
        mixed = contexts[:, 0].astype(np.uint64) * np.uint64(self.multipliers[0])
        rows, heads = [], len(self.sizes) // (self.n_gram - 1)
        for j in range(1, self.n_gram):
            before = contexts[:, j]
            ended |= (before < 0) | (before == self.end_token)
            tokens = np.where(ended, self.end_token, before).astype(np.uint64)
            mixed = mixed ^ (tokens * np.uint64(self.multipliers[j]))
            for head in range((j - 1) * heads, j * heads):
                row = (mixed % np.uint64(self.sizes[head])).astype(np.int64)
                rows.append(row + self.offsets[head])
        return np.stack(rows, axis=1)

    def _rows_of(self, context: list[int]) -> list[int]:
        """The rows of one token: NumPy would take most of its time to begin."""
        ended, mixed = False, context[0] * self.multipliers[0]
        rows: list[int] = []
        heads = len(self.sizes) // (self.n_gram - 1)
        for j in range(1, self.n_gram):
            ended = ended or context[j] < 0 or context[j] == self.end_token
            mixed ^= (self.end_token if ended else context[j]) * self.multipliers[j]
            own = slice((j - 1) * heads, j * heads)
            here = zip(self.sizes[own], self.offsets[own], strict=True)
            rows += [(mixed & WORD) % size + offset for size, offset in here]
        return rows
