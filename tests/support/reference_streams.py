"""Several residual streams in the plain forward pass, and the n-gram table added to them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.streams import GatedStreams, SinkhornStreams, Streams
from tests.support.reference_delta_net import F64, Weights, convolve, sigmoid, silu


class Entered:
    """What a block reads of streams r f64[n_tokens, n_stream, n_embd]: `x`."""

    def __init__(self, weights: Weights, streams: Streams, norm: str, r: F64) -> None:
        self._r, self._streams = r, streams
        n_tokens, n_stream, _ = r.shape
        if isinstance(streams, GatedStreams):
            normed = by_stream_norm(weights, r, norm)
            flat = normed.reshape(n_tokens, -1)
            low = silu(weights.linear(streams.down, flat) / n_stream)
            gate = sigmoid(weights.linear(streams.up, low)).reshape(r.shape)
            self.x = (normed * gate).mean(axis=1)
            if streams.inject is not None:
                self._post = 2 * sigmoid(weights.linear(streams.inject, flat) / n_stream)
        elif isinstance(streams, SinkhornStreams):
            pre, self._post, self._matrix = sinkhorn(weights, streams, r)
            self.x = weights.norm((pre[:, :, None] * r).sum(axis=1), norm)
        else:
            self.x = weights.norm(r.mean(axis=1), norm)

    def returned(self, y: F64) -> F64:
        """The streams after the block gave y f64[n_tokens, n_embd]."""
        added = self._post[:, :, None] * y[:, None]
        if isinstance(self._streams, GatedStreams):
            return self._r + added
        return added + np.einsum("tfo,tfe->toe", self._matrix, self._r)


def sinkhorn(weights: Weights, streams: SinkhornStreams, r: F64) -> tuple[F64, F64, F64]:
    n_tokens, n, _ = r.shape
    flat = r.reshape(n_tokens, -1)
    flat = flat / np.sqrt((flat * flat).mean(axis=1, keepdims=True) + weights.eps)
    mix, base = weights.linear(streams.mix, flat), weights.values(streams.base)
    scale, e = weights.values(streams.scale), streams.epsilon
    pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + e
    post = 2 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    raw = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(n_tokens, n, n)
    c = np.exp(raw - raw.max(axis=2, keepdims=True))
    c = c / c.sum(axis=2, keepdims=True) + e
    c = c / (c.sum(axis=1, keepdims=True) + e)
    for _ in range(streams.n_iterations - 1):
        c = c / (c.sum(axis=2, keepdims=True) + e)
        c = c / (c.sum(axis=1, keepdims=True) + e)
    return pre, post, c


def remember(weights: Weights, memory: NgramMemorySpec, r: F64, tokens: NDArray[np.int32]) -> F64:
    """The streams r with the memory's rows added."""
    n_tokens, n_stream, n_embd = r.shape
    rows = [ngram_rows(memory, [int(t) for t in tokens[: i + 1]]) for i in range(n_tokens)]
    found = weights.values(memory.table)[np.array(rows)].reshape(n_tokens, -1)
    key = weights.linear(memory.key, found).reshape(r.shape)
    key = by_stream_norm(weights, key, memory.key_norm)
    query = by_stream_norm(weights, r, memory.query_norm)
    d = (key * query).sum(axis=2) / np.sqrt(n_embd)
    gate = sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6)))
    value = gate[:, :, None] * weights.linear(memory.value, found)[:, None]
    read = by_stream_norm(weights, value, memory.conv_norm).reshape(n_tokens, -1)
    taps = weights.values(memory.conv).reshape(n_stream * n_embd, memory.n_taps)
    return r + value + silu(convolve(read, taps, memory.n_gram)).reshape(r.shape)


def ngram_rows(memory: NgramMemorySpec, tokens: list[int]) -> list[int]:
    """Table rows of the last of `tokens`, in Python's own numbers."""
    context = [tokens[-1]]
    for j in range(1, memory.n_gram):
        before = tokens[-1 - j] if j < len(tokens) else memory.end_token
        ended = j > 1 and context[-1] == memory.end_token
        context.append(memory.end_token if ended else before)
    rows, per_length = [], len(memory.sizes) // (memory.n_gram - 1)
    for i, (size, offset) in enumerate(zip(memory.sizes, memory.offsets, strict=True)):
        mixed = 0
        for token, multiplier in zip(
            context[: 2 + i // per_length], memory.multipliers, strict=False
        ):
            mixed ^= token * multiplier % 2**64
        rows.append(mixed % size + offset)
    return rows


def by_stream_norm(weights: Weights, r: F64, name: str) -> F64:
    """RMS norm of each stream with its own weight."""
    weight = weights.values(name).reshape(r.shape[1:])
    return r / np.sqrt((r * r).mean(axis=2, keepdims=True) + weights.eps) * weight
