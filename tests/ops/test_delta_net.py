"""Convolution, delta net recurrence and gates against NumPy, whatever the cut of the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.cpu.convolution import CHANNELS, CONVOLUTION, convolution
from ops.cpu.delta_net import DELTA_NET, SCRATCH_ROWS, delta_net
from ops.cpu.gated_heads import GATED_HEADS, gate_heads, split_gates
from ops.cpu.gates import SIGMOID, SILU
from ops.cpu.spans import SPAN
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]
N_TOKENS = 23


def spans_of(*parts: tuple[int, int, int, int]) -> NDArray[Any]:
    """(first token, tokens, position, slot) of each sequence of a step."""
    return np.array(list(parts), SPAN)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("n_channels", "n_taps", "dilation"), [(40, 4, 1), (300, 4, 3), (8, 2, 1)])
def test_a_convolution_reads_the_past_from_the_state(
    n_channels: int, n_taps: int, dilation: int
) -> None:
    x, weights = normal(1, N_TOKENS, n_channels), normal(2, n_taps, n_channels)
    reach = (n_taps - 1) * dilation
    padded = np.concatenate([np.zeros((reach, n_channels)), x])
    total = sum(padded[i * dilation : i * dilation + N_TOKENS] * weights[i] for i in range(n_taps))
    expected = total * sigmoid(total)

    def run(cuts: list[int]) -> F32:
        rows = x.copy()
        states = np.full((3, reach, n_channels), np.nan, np.float32)
        scratch = np.zeros(CHANNELS, np.float32)
        for start, end in zip([0, *cuts], [*cuts, N_TOKENS], strict=True):
            spans = spans_of((start, end - start, start, 2))
            args = job_args(
                CONVOLUTION, spans=spans, states=states, state_bytes=states[0].nbytes,
                x=rows, x_stride=rows.strides[0], weights=weights, n_channels=n_channels,
                n_taps=n_taps, dilation=dilation, scratch=scratch,
            )  # fmt: skip
            run_job(convolution, args, -(-n_channels // CHANNELS))
        return rows

    whole = run([])
    assert np.abs(whole - expected).max() < 1e-5
    for cuts in ([1, 2, 3, 9], [22], list(range(1, N_TOKENS))):
        assert np.array_equal(run(cuts), whole), cuts


def delta_reference(values: dict[str, F32], sizes: tuple[int, int, int], kind: int) -> F32:
    """The formulas of DeltaNetSpec, token after token, in double precision."""
    n_key, n_value, dim = sizes
    qkv = values["qkv"].astype(np.float64).reshape(N_TOKENS, 2 * n_key + n_value, dim)
    q, k, v = qkv[:, :n_key], qkv[:, n_key : 2 * n_key], qkv[:, 2 * n_key :]
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    log_decay = (values["decay"] + values["bias"]).reshape(N_TOKENS, n_value, -1)
    if kind == SILU:
        log_decay = np.logaddexp(0, log_decay) * values["rate"][:, None]
    else:
        log_decay = -5 * sigmoid(-log_decay * values["rate"][:, None])
    out = np.zeros((N_TOKENS, n_value, dim))
    for head in range(n_value):
        m = np.zeros((dim, dim))
        for t in range(N_TOKENS):
            key = k[t, head % n_key]
            m = m * np.exp(log_decay[t, head])[:, None]
            d = sigmoid(values["beta"][t, head]) * (v[t, head] - m.T @ key)
            m = m + np.outer(key, d)
            o = m.T @ q[t, head % n_key] / np.sqrt(dim)
            out[t, head] = o / np.sqrt(np.mean(o * o) + 1e-5) * values["norm"]
    gate = values["gate"].reshape(out.shape)
    return out * sigmoid(gate) * (gate if kind == SILU else 1)


@pytest.mark.parametrize(
    ("sizes", "kind"), [((2, 6, 16), SILU), ((3, 3, 80), SIGMOID), ((1, 2, 128), SIGMOID)]
)
def test_a_delta_net_gives_the_same_bits_for_any_cut(
    sizes: tuple[int, int, int], kind: int
) -> None:
    n_key, n_value, dim = sizes
    width = 1 if kind == SILU else dim
    values = {
        "qkv": normal(1, N_TOKENS, (2 * n_key + n_value) * dim),
        "decay": normal(2, N_TOKENS, n_value * width),
        "bias": normal(3, n_value * width),
        "rate": -np.exp(normal(4, n_value)),
        "beta": normal(5, N_TOKENS, n_value),
        "gate": normal(6, N_TOKENS, n_value * dim),
        "norm": 1 + normal(7, dim) / 5,
    }

    def run(cuts: list[int]) -> F32:
        out = np.zeros((N_TOKENS, n_value * dim), np.float32)
        states = np.full((2, n_value, dim, dim), np.nan, np.float32)
        scratch = np.zeros((SCRATCH_ROWS, dim), np.float32)
        for start, end in zip([0, *cuts], [*cuts, N_TOKENS], strict=True):
            strides = {
                f"{name}_stride": values[name].strides[0]
                for name in ("qkv", "decay", "beta", "gate")
            }
            spans = spans_of((start, end - start, start, 1))
            args = job_args(
                DELTA_NET, spans=spans, states=states,
                state_bytes=states[0].nbytes, n_key_head=n_key, n_value_head=n_value, head_dim=dim,
                qkv=values["qkv"], decay=values["decay"], decay_width=width,
                decay_bias=values["bias"], decay_rate=values["rate"], has_floor=kind == SIGMOID,
                beta=values["beta"], gate=values["gate"], gate_kind=kind, norm=values["norm"],
                out=out, out_stride=out.strides[0], decay_floor=-5, q_scale=dim**-0.5, eps=1e-5,
                l2_eps=1e-6, scratch=scratch, **strides,
            )  # fmt: skip
            run_job(delta_net, args, n_value)
        return out

    whole = run([])
    expected = delta_reference(values, sizes, kind).reshape(whole.shape)
    assert np.abs(whole - expected).max() < 2e-5
    for cuts in ([1, 2, 10], [22], list(range(1, N_TOKENS))):
        assert np.array_equal(run(cuts), whole), cuts


def test_gates_leave_their_queries_and_come_back_to_the_output() -> None:
    n_head, dim_k, dim_v = 3, 20, 12
    q = normal(1, 5, n_head * (dim_k + dim_v))
    before = q.copy().reshape(5, n_head, dim_k + dim_v)
    gates = np.zeros((5, n_head * dim_v), np.float32)
    attended = normal(2, 5, n_head * dim_v)
    expected = attended * sigmoid(before[:, :, dim_k:].reshape(5, -1))
    tokens = np.array([3, 1], np.int32)
    args = job_args(
        GATED_HEADS, q=q, q_stride=q.strides[0], gates=gates, gates_stride=gates.strides[0],
        n_head=n_head, dim_k=dim_k, dim_v=dim_v, tokens=tokens, attended=attended,
        attended_stride=attended.strides[0],
    )  # fmt: skip
    others = attended[[0, 2, 4]].copy()

    run_job(split_gates, args, 5)
    run_job(gate_heads, args, 2)

    assert np.array_equal(q[:, : n_head * dim_k], before[:, :, :dim_k].reshape(5, -1))
    assert np.abs(attended[tokens] - expected[tokens]).max() < 1e-6
    assert np.array_equal(attended[[0, 2, 4]], others)
