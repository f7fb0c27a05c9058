"""A plain forward pass in NumPy float64, from ModelSpec: the oracle for every executor.

It shares no arithmetic with the engine: weights are dequantized, activations never quantized, the
whole sequence is computed at once without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.models import Model
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.indexer import IndexerSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.rope import RopePairing, RopeSpec
from runtime.models.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    Linear,
    Mixer,
    MoeSpec,
    QKNorm,
    RouterScore,
    RouterSpec,
)
from tests.support.reference_delta_net import delta_net
from tests.support.reference_indexer import keys_read
from tests.support.reference_streams import Entered, remember

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def reference_logits(model: Model, tokens: Sequence[int] | NDArray[np.int32]) -> F64:
    """Logits of every position, f64[n_tokens, n_vocab]."""
    return _Reference(model).logits(np.asarray(tokens))


class _Reference:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.spec = model.spec
        self.eps = model.spec.eps
        self._read: NDArray[np.bool_] | None = None  # what the last indexer chose

    def logits(self, tokens: NDArray[np.int32]) -> F64:
        x = self.values(self.spec.token_embedding)[tokens]
        if self.spec.n_stream > 1:
            return self.logits_of_streams(x, tokens)
        for layer in self.spec.layers:
            x = x + self.mix(layer.mixer, self.norm(x, layer.mixer_norm))
            x = x + self.feed_forward(layer, self.norm(x, layer.feed_forward_norm))
        return self.linear(self.spec.output, self.norm(x, self.spec.output_norm))

    def logits_of_streams(self, x: F64, tokens: NDArray[np.int32]) -> F64:
        spec, r = self.spec, np.repeat(x[:, None], self.spec.n_stream, axis=1)
        for layer in spec.layers:
            if layer.memory is not None:
                r = remember(self, layer.memory, r, tokens)
            entered = Entered(self, layer.mixer_streams, layer.mixer_norm, r)
            r = entered.returned(self.mix(layer.mixer, entered.x))
            entered = Entered(self, layer.feed_forward_streams, layer.feed_forward_norm, r)
            r = entered.returned(self.feed_forward(layer, entered.x))
        last = Entered(self, spec.output_streams, spec.output_norm, r)
        return self.linear(spec.output, last.x)

    def feed_forward(self, layer: LayerSpec, h: F64) -> F64:
        if isinstance(layer.feed_forward, MoeSpec):
            return self.moe(layer.feed_forward, h)
        return self.dense(layer.feed_forward, h)

    def values(self, name: str) -> F64:
        return self.model.weights[name].to_f32().astype(np.float64)

    def norm(self, x: F64, name: str) -> F64:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.spec.eps) * self.values(name)

    def linear(self, linear: Linear, x: F64, expert: int | None = None) -> F64:
        pick = slice(None) if expert is None else expert
        weight = self.values(linear.weight)[pick].reshape(linear.n_out, linear.n_in)
        y = x @ weight.T
        if linear.scale is not None:
            y = y * self.values(linear.scale)[0 if expert is None else expert]
        if linear.bias is not None:
            y = y + self.values(linear.bias)[pick]
        return y

    def mix(self, mixer: Mixer, h: F64) -> F64:
        if isinstance(mixer, LatentAttentionSpec):
            return self.latent_attention(mixer, h)
        if isinstance(mixer, DeltaNetSpec):
            return delta_net(self, mixer, h)
        return self.attention(mixer, h)

    def attention(self, spec: AttentionSpec, h: F64) -> F64:
        n = len(h)
        qkv = np.concatenate([self.linear(linear, h) for linear in spec.qkv], axis=1)
        n_q = spec.n_q + spec.n_gate
        q, k, v = np.split(qkv, [n_q, n_q + spec.n_k], axis=1)
        if spec.gated:
            by_head = q.reshape(n, spec.n_head, -1)
            q, gate = by_head[:, :, : spec.head_dim_k], by_head[:, :, spec.head_dim_k :]
            q = q.reshape(n, -1)
        if spec.qk_norm is QKNorm.ROW:
            q, k = self.norm(q, str(spec.q_norm)), self.norm(k, str(spec.k_norm))
        q = q.reshape(n, spec.n_head, spec.head_dim_k)
        k = k.reshape(n, spec.n_head_kv, spec.head_dim_k)
        v = v.reshape(n, spec.n_head_kv, spec.head_dim_v)
        if spec.qk_norm is QKNorm.HEAD:
            q, k = self.norm(q, str(spec.q_norm)), self.norm(k, str(spec.k_norm))
        if spec.rope is not None:
            q, k = self.rotate(spec.rope, q), self.rotate(spec.rope, k)
        read = None if spec.indexer is None else self.read(spec.indexer, h, h)
        group = spec.n_head // spec.n_head_kv
        out = np.empty((n, spec.n_head, spec.head_dim_v))
        for head in range(spec.n_head):
            scores = spec.scale * q[:, head] @ k[:, head // group].T
            sink = None if spec.sinks is None else float(self.values(spec.sinks)[head])
            out[:, head] = causal_softmax(scores, spec.window, sink, read) @ v[:, head // group]
        if spec.gated:
            out = out * sigmoid(gate)
        return self.linear(spec.output, spec.value_scale * out.reshape(n, -1))

    def latent_attention(self, spec: LatentAttentionSpec, h: F64) -> F64:
        """Not absorbed: every head has keys and values of its own."""
        n = len(h)
        q = self.linear(spec.query[0], h)
        read = self._read if spec.reads_as_before else None
        if spec.query_norm is not None:
            q = self.norm(q, spec.query_norm)
            if spec.indexer is not None:
                read = self.read(spec.indexer, h, q)
            q = self.linear(spec.query[1], q)
        q = q.reshape(n, spec.n_head, spec.dim_nope + spec.dim_rope)
        q_nope, q_rope = q[:, :, : spec.dim_nope], q[:, :, spec.dim_nope :]
        cached = self.linear(spec.latent, h)
        latent = self.norm(cached[:, : spec.dim_latent], spec.latent_norm)
        k_rope = cached[:, None, spec.dim_latent :]
        if spec.rope is not None:
            q_rope, k_rope = self.rotate(spec.rope, q_rope), self.rotate(spec.rope, k_rope)
        key_up, value_up = self.values(spec.key_up.weight), self.values(spec.value_up.weight)
        out = np.empty((n, spec.n_head, spec.dim_v))
        for head in range(spec.n_head):
            scores = q_nope[:, head] @ (latent @ key_up[head]).T
            scores = spec.scale * (scores + q_rope[:, head] @ k_rope[:, 0].T)
            out[:, head] = causal_softmax(scores, read=read) @ (latent @ value_up[head].T)
        return self.linear(spec.output, out.reshape(n, -1))

    def read(self, indexer: IndexerSpec, h: F64, query_input: F64) -> NDArray[np.bool_]:
        """Which keys each token reads, kept for layers that read the same."""

        def rotate(x: F64, positions: NDArray[np.int64]) -> F64:
            return x if indexer.rope is None else self.rotate(indexer.rope, x, positions)

        self._read = keys_read(self, indexer, h, query_input, rotate)
        return self._read

    def rotate(self, rope: RopeSpec, x: F64, positions: I64 | None = None) -> F64:
        """x: f64[n, heads, head_dim], position = row if not given."""
        half = rope.n_rot // 2
        divisors = self.values(rope.factors) if rope.factors is not None else np.ones(half)
        first, second = np.arange(half), np.arange(half) + half
        if rope.pairing is RopePairing.NORM:
            first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
        y = x.copy()
        at = np.arange(len(x)) if positions is None else positions
        for position in range(len(x)):
            for i in range(half):
                angle = rope_angle(rope, i, float(divisors[i])) * float(at[position])
                cos, sin = rope.magnitude * math.cos(angle), rope.magnitude * math.sin(angle)
                a, b = x[position, :, first[i]], x[position, :, second[i]]
                y[position, :, first[i]] = a * cos - b * sin
                y[position, :, second[i]] = a * sin + b * cos
        return y

    def dense(self, spec: DenseSpec, h: F64) -> F64:
        both = np.concatenate([self.linear(linear, h) for linear in spec.gate_up], axis=1)
        gate, up = both[:, : spec.n_ff], both[:, spec.n_ff :]
        return self.linear(spec.down, activate(spec, gate, up))

    def moe(self, spec: MoeSpec, h: F64) -> F64:
        chosen, weights = self.route(spec, h)
        y = np.zeros((len(h), self.spec.n_embd))
        for expert in np.unique(chosen):
            token, rank = np.nonzero(chosen == expert)
            both = [self.linear(linear, h[token], int(expert)) for linear in spec.gate_up]
            gate_up = np.concatenate(both, axis=1)
            a = activate(spec, gate_up[:, : spec.n_ff], gate_up[:, spec.n_ff :])
            y[token] += weights[token, rank, None] * self.linear(spec.down, a, int(expert))
        if spec.shared is not None:
            shared = self.dense(spec.shared.dense, h)
            if spec.shared.gate is not None:
                shared = shared * sigmoid(self.linear(spec.shared.gate, h))
            y = y + shared
        return y

    def route(self, spec: MoeSpec, h: F64) -> tuple[I64, F64]:
        """Experts of each token i64[n, n_used] and their weights."""
        router: RouterSpec = spec.router
        logits = self.linear(router.linear, h)
        scores = logits
        if router.score is RouterScore.SOFTMAX:
            scores = softmax(logits)
        elif router.score is RouterScore.SIGMOID:
            scores = sigmoid(logits)
        selection = scores
        if router.selection_bias is not None:
            selection = selection + self.values(router.selection_bias)
        if router.n_groups > 1:
            grouped = selection.reshape(len(h), router.n_groups, -1)
            best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
            limit = np.sort(best, axis=1)[:, -router.n_groups_used, None]
            selection = np.where((best >= limit)[:, :, None], grouped, -np.inf).reshape(len(h), -1)
        chosen = np.argsort(-selection, axis=1, kind="stable")[:, : spec.n_used]
        weights = np.take_along_axis(scores, chosen, axis=1)
        if router.score is RouterScore.SOFTMAX_SELECTED:
            weights = softmax(weights)
        if router.renormalise:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 2.0**-14)
        return chosen, router.scale * weights


def causal_softmax(
    scores: F64,
    window: int | None = None,
    sink: float | None = None,
    read: NDArray[np.bool_] | None = None,
) -> F64:
    """Of f64[n, n] scores, within the window, where `read`; exp(sink) joins the denominators."""
    age = np.arange(len(scores))[:, None] - np.arange(len(scores))[None, :]
    seen = (age >= 0) & (age < (window or len(scores)))
    if read is not None:
        seen &= read
    peak = scores.max(axis=1, keepdims=True)
    e = np.where(seen, np.exp(scores - peak), 0.0)
    total = e.sum(axis=1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - peak)
    mixed: F64 = e / total
    return mixed


def rope_angle(rope: RopeSpec, pair: int, divisor: float) -> float:
    """Angle of pair `pair` at position 1."""
    plain = rope.base ** (-2.0 * pair / rope.n_rot) / divisor
    if rope.yarn is None:
        return plain / rope.factor
    bounds = [
        rope.n_rot
        * math.log(rope.yarn.n_ctx_original / (2 * math.pi * rotations))
        / (2 * math.log(rope.base))
        for rotations in (rope.yarn.beta_fast, rope.yarn.beta_slow)
    ]
    low, high = max(0, math.floor(bounds[0])), min(rope.n_rot - 1, math.ceil(bounds[1]))
    ramp = min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
    return ramp * plain / rope.factor + (1.0 - ramp) * plain


def activate(spec: DenseSpec | MoeSpec, gate: F64, up: F64) -> F64:
    if spec.activation is not Activation.SWIGLU:
        gate = np.minimum(gate, spec.activation_limit)
        up = np.clip(up, -spec.activation_limit, spec.activation_limit)
    if spec.activation is Activation.SWIGLU_OAI:
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    return gate * sigmoid(gate) * up


def sigmoid(x: F64) -> F64:
    y: F64 = 1.0 / (1.0 + np.exp(-x))
    return y


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    y: F64 = e / e.sum(axis=1, keepdims=True)
    return y
