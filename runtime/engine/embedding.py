"""EmbeddingRows: rows of the embedding table as f32, all of them kept where the table is small.

Dequantizing one row in NumPy takes about 50 us, a tenth of a small model's step and nothing of a
large one's.
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from ops.cpu.program import filled
from runtime.models.weights import Weight

KEPT_BYTES = 32 << 20
"""Largest f32 table that is kept; making it takes about 10 ms per MB."""
TURN_VALUES = 64 << 10
"""Values that are dequantized, in about a millisecond, before the event loop gets a turn."""


class EmbeddingRows:
    """f32 rows of the two-dimensional tensor `weight`."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        n_embd, n_vocab = weight.shape[:2]
        self._rows_a_turn = max(1, TURN_VALUES // n_embd)
        self.table: NDArray[np.float32] | None = None
        """f32[n_vocab, n_embd], or None: then `copy_to` is needed."""
        if 4 * n_embd * n_vocab <= KEPT_BYTES:
            shape = (n_vocab, n_embd)
            self.table = filled(shape, lambda: weight.to_f32().reshape(shape))

    async def copy_to(self, out: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """out[i] = the row of token_ids[i]."""
        for first in range(0, len(token_ids), self._rows_a_turn):
            if first > 0:
                await asyncio.sleep(0)
            part = slice(first, first + self._rows_a_turn)
            out[part] = self._weight.format.dequantize_rows(self._weight.data[token_ids[part]])
