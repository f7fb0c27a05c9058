"""EmbeddingRows: rows of the embedding table as f32, kept where the table is small.

Dequantizing one row in NumPy takes about 50 us, a tenth of a small model's step and nothing of a
large one's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.models.weights import Weight

KEPT_BYTES = 128 << 20
"""Largest f32 table whose rows are kept; its memory is taken row by row."""


class EmbeddingRows:
    """f32 rows of the two-dimensional tensor `weight`."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        n_embd, n_vocab = weight.shape[:2]
        self._kept: NDArray[np.float32] | None = None
        if 4 * n_embd * n_vocab <= KEPT_BYTES:
            self._kept = np.empty((n_vocab, n_embd), np.float32)
            self._known = np.zeros(n_vocab, np.bool_)

    def copy_to(self, out: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """out[i] = the row of token_ids[i]."""
        if self._kept is None:
            out[:] = self._dequantize(token_ids)
            return
        known = self._known[token_ids]
        if not known.all():
            new = np.unique(token_ids[~known])
            self._kept[new] = self._dequantize(new)
            self._known[new] = True
        np.take(self._kept, token_ids, axis=0, out=out, mode="clip")

    def _dequantize(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._weight.format.dequantize_rows(self._weight.data[token_ids])
