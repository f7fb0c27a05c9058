"""Sequences of random keys and values in scattered GPU pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kv_layout import PAGE_TOKENS
from ops.quants.block import F32
from tests.support.kv_pages import KVPages


@dataclass(frozen=True)
class KVSequences:
    """pages    what a machine gets; everything that no token holds is NaN
    tables   i32[n_sequences, max_pages], padded with -1
    content  keys f32[n_head_kv, n_tokens, dim_k] and values of each sequence, as cached
    """

    pages: KVPages
    tables: NDArray[np.int32]
    content: list[tuple[F32, F32]]

    @classmethod
    def random(
        cls, lengths: list[int], n_head_kv: int, dim_k: int, dim_v: int, k_cache: str, v_cache: str
    ) -> KVSequences:
        """Normally distributed; some keys much alike, some tokens with large values."""
        generator = np.random.default_rng(2)
        counts = [-(-length // PAGE_TOKENS) for length in lengths]
        pages = KVPages(n_head_kv, dim_k, dim_v, k_cache, v_cache, n_pages=sum(counts) + 1)
        tables = np.full((len(lengths), max(counts) + 1), -1, np.int32)
        numbers = 1 + generator.permutation(sum(counts)).astype(np.int32)
        content = []
        for i, length in enumerate(lengths):
            tables[i, : counts[i]], numbers = numbers[: counts[i]], numbers[counts[i] :]
            k = generator.normal(size=(n_head_kv, length, dim_k)).astype(np.float32)
            v = generator.normal(size=(n_head_kv, length, dim_v)).astype(np.float32)
            pages.store_sequence(tables[i], k, v)
            content.append(pages.load_sequence(tables[i], length))
        return cls(pages, tables, content)
