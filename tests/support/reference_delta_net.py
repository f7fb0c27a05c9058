"""The delta net of the plain forward pass: the recurrence token by token, in float64."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.models.delta_net import DeltaNetSpec, GateFunction
from runtime.models.spec import Linear

F64 = NDArray[np.float64]


class Weights(Protocol):
    """What the forward pass gives its parts."""

    eps: float

    def values(self, name: str) -> F64: ...

    def linear(self, linear: Linear, x: F64) -> F64: ...

    def norm(self, x: F64, name: str) -> F64: ...


def delta_net(weights: Weights, spec: DeltaNetSpec, h: F64) -> F64:
    """What the mixer adds to the residual stream, from the normalised rows h."""
    n, dim = len(h), spec.head_dim
    mixed = np.concatenate([weights.linear(linear, h) for linear in spec.qkv], axis=1)
    taps = np.concatenate([weights.values(name).reshape(-1, spec.n_taps) for name in spec.conv])
    mixed = silu(convolve(mixed, taps))
    q, k, v = np.split(mixed, [spec.n_key, 2 * spec.n_key], axis=1)
    q, k = (unit(x.reshape(n, spec.n_key_head, dim), spec.l2_eps) for x in (q, k))
    v = v.reshape(n, spec.n_value_head, dim)
    decay = np.exp(log_decay(weights, spec, h))
    beta = sigmoid(weights.linear(spec.beta, h))
    out = np.zeros_like(v)
    for head in range(spec.n_value_head):
        state, key_head = np.zeros((dim, dim)), head % spec.n_key_head
        for t in range(n):
            state = state * decay[t, head][:, None]
            delta = beta[t, head] * (v[t, head] - state.T @ k[t, key_head])
            state = state + np.outer(k[t, key_head], delta)
            out[t, head] = state.T @ q[t, key_head] / np.sqrt(dim)
    gate = chain(weights, spec.gate, h).reshape(out.shape)
    gated = weights.norm(out, spec.norm) * sigmoid(gate)
    if spec.gate_function is GateFunction.SILU:
        gated = gated * gate
    return weights.linear(spec.output, gated.reshape(n, -1))


def log_decay(weights: Weights, spec: DeltaNetSpec, h: F64) -> F64:
    """f64[n_tokens, n_value_head, 1 or head_dim]."""
    raw = chain(weights, spec.decay, h) + weights.values(spec.decay_bias)
    raw = raw.reshape(len(h), spec.n_value_head, -1)
    rate = weights.values(spec.decay_rate)[:, None]
    if spec.decay_floor is None:
        return np.logaddexp(0, raw) * rate
    return spec.decay_floor * sigmoid(-raw * rate)


def chain(weights: Weights, linears: tuple[Linear, ...], x: F64) -> F64:
    for linear in linears:
        x = weights.linear(linear, x)
    return x


def convolve(x: F64, taps: F64, dilation: int = 1) -> F64:
    """Causal; x f64[n_tokens, n_channels], taps f64[n_channels, n_taps], the last one is now's."""
    n_taps = taps.shape[1]
    padded = np.concatenate([np.zeros(((n_taps - 1) * dilation, x.shape[1])), x])
    parts = [padded[i * dilation : i * dilation + len(x)] * taps[:, i] for i in range(n_taps)]
    return np.sum(parts, axis=0)


def unit(x: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)


def sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: F64) -> F64:
    return x * sigmoid(x)
