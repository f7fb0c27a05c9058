"""Which keys sparse attention reads, in the plain forward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.models.indexer import IndexerSpec
from tests.support.reference_delta_net import F64, Weights

Rotate = Callable[[F64, NDArray[np.int64]], F64]


def keys_read(
    weights: Weights, indexer: IndexerSpec, x: F64, query_input: F64, rotate: Rotate
) -> NDArray[np.bool_]:
    """bool[n_tokens, n_tokens]: which earlier tokens each reads.

    rotate: rope of f64[n, heads, head_dim] at positions i64[n]
    """
    n, dim, size = len(x), indexer.head_dim, indexer.block
    n_blocks = n // size
    query = weights.linear(indexer.query, query_input).reshape(n, indexer.n_head, dim)
    if indexer.query_norm is not None:
        query = weights.norm(query, indexer.query_norm)
    query = rotate(query, np.arange(n))
    keys = block_keys(weights, indexer, x)[:n_blocks]
    keys = rotate(keys[:, None], size * np.arange(n_blocks))[:, 0]
    products = np.maximum(np.einsum("thd,bd->thb", query, keys), 0)
    if indexer.weight is not None:
        products = products * weights.linear(indexer.weight, x)[:, :, None]
    scores = indexer.scale * products.sum(axis=1)
    read = np.zeros((n, n), bool)
    for t in range(n):
        n_seen = (t + 1) // size
        best = np.argsort(-scores[t, :n_seen], kind="stable")[: indexer.n_best]
        for block in best:
            read[t, block * size : (block + 1) * size] = True
        read[t, n_seen * size : t + 1] = True
    return read


def block_keys(weights: Weights, indexer: IndexerSpec, x: F64) -> F64:
    """Keys of complete blocks before rope, f64[n_blocks, head_dim]."""
    size = indexer.block
    n_blocks = len(x) // size
    shape = (n_blocks, size, indexer.head_dim)
    keys = weights.linear(indexer.key, x)
    if indexer.key_bias is not None:
        keys = keys - keys.mean(axis=1, keepdims=True)
        keys = keys / np.sqrt((keys * keys).mean(axis=1, keepdims=True) + indexer.key_eps)
        keys = keys * weights.values(indexer.key_norm) + weights.values(indexer.key_bias)
    keys = keys[: n_blocks * size].reshape(shape)
    if indexer.pool_gate is None or indexer.pool_bias is None:
        pooled = keys.mean(axis=1)
    else:
        gate = weights.linear(indexer.pool_gate, x)[: n_blocks * size].reshape(shape)
        bias = weights.values(indexer.pool_bias).reshape(size, indexer.head_dim)
        share = np.exp(gate + bias)
        pooled = (share / share.sum(axis=1, keepdims=True) * keys).sum(axis=1)
    return pooled if indexer.key_bias is not None else weights.norm(pooled, indexer.key_norm)
