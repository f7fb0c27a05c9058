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
from runtime.models.rope import RopePairing, RopeSpec
from runtime.models.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    Linear,
    MoeSpec,
    QKNorm,
    RouterScore,
    RouterSpec,
)

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def reference_logits(model: Model, tokens: Sequence[int] | NDArray[np.int32]) -> F64:
    """Logits of every position, f64[n_tokens, n_vocab]."""
    return _Reference(model).logits(np.asarray(tokens))


class _Reference:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.spec = model.spec

    def logits(self, tokens: NDArray[np.int32]) -> F64:
        x = self.values(self.spec.token_embedding)[tokens]
        for layer in self.spec.layers:
            x = x + self.attention(layer.mixer, self.norm(x, layer.mixer_norm))
            h = self.norm(x, layer.feed_forward_norm)
            if isinstance(layer.feed_forward, MoeSpec):
                x = x + self.moe(layer.feed_forward, h)
            else:
                x = x + self.dense(layer.feed_forward, h)
        return self.linear(self.spec.output, self.norm(x, self.spec.output_norm))

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

    def attention(self, spec: AttentionSpec, h: F64) -> F64:
        n = len(h)
        qkv = np.concatenate([self.linear(linear, h) for linear in spec.qkv], axis=1)
        q, k, v = np.split(qkv, [spec.n_q, spec.n_q + spec.n_k], axis=1)
        if spec.qk_norm is QKNorm.ROW:
            q, k = self.norm(q, str(spec.q_norm)), self.norm(k, str(spec.k_norm))
        q = q.reshape(n, spec.n_head, spec.head_dim_k)
        k = k.reshape(n, spec.n_head_kv, spec.head_dim_k)
        v = v.reshape(n, spec.n_head_kv, spec.head_dim_v)
        if spec.qk_norm is QKNorm.HEAD:
            q, k = self.norm(q, str(spec.q_norm)), self.norm(k, str(spec.k_norm))
        if spec.rope is not None:
            q, k = self.rotate(spec.rope, q), self.rotate(spec.rope, k)
        group = spec.n_head // spec.n_head_kv
        out = np.empty((n, spec.n_head, spec.head_dim_v))
        for head in range(spec.n_head):
            scores = spec.scale * q[:, head] @ k[:, head // group].T
            out[:, head] = self.mix(spec, head, scores) @ v[:, head // group]
        return spec.value_scale * self.linear(spec.output, out.reshape(n, -1))

    def mix(self, spec: AttentionSpec, head: int, scores: F64) -> F64:
        """Causal softmax of f64[n, n] scores, within the window and with the head's sink."""
        age = np.arange(len(scores))[:, None] - np.arange(len(scores))[None, :]
        seen = (age >= 0) & (age < (spec.window or len(scores)))
        e = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
        total = e.sum(axis=1, keepdims=True)
        if spec.sinks is not None:
            sink = self.values(spec.sinks)[head]
            total = total + np.exp(sink - scores.max(axis=1, keepdims=True))
        mixed: F64 = e / total
        return mixed

    def rotate(self, rope: RopeSpec, x: F64) -> F64:
        """x: f64[n, heads, head_dim], position = row."""
        half = rope.n_rot // 2
        divisors = self.values(rope.factors) if rope.factors is not None else np.ones(half)
        first, second = np.arange(half), np.arange(half) + half
        if rope.pairing is RopePairing.NORM:
            first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
        y = x.copy()
        for position in range(len(x)):
            for i in range(half):
                angle = rope_angle(rope, i, float(divisors[i])) * position
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
