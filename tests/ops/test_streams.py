"""Residual streams and the n-gram memory's gate against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.cpu.ngram_memory import NGRAM_MEMORY, gate_memory
from ops.cpu.streams import (
    GATED,
    MEAN,
    NO_STREAMS,
    SINKHORN,
    STREAMS,
    enter_streams,
    sinkhorn_input,
    spread_streams,
)
from tests.support.jobs import job_args, run_job

F32 = NDArray[np.float32]
N_TOKENS, N_STREAM, N = 5, 4, 40
EPS = 1e-5


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def rms(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)


def stream_args(x: F32, **values: Any) -> NDArray[Any]:
    strides = {f"{name}_stride": v.strides[0] for name, v in values.items() if name in STRIDED}
    room = ROOM
    return job_args(
        STREAMS, x=x, x_stride=x.strides[0], n=N, n_stream=N_STREAM, scratch=room,
        scratch_bytes=room.nbytes, eps=EPS, **values, **strides,
    )  # fmt: skip


STRIDED = ("delta", "returns", "flat", "mix", "out_f32")
ROOM = np.zeros((1 + N_STREAM) * N, np.float32)


def test_every_stream_begins_as_the_embedding() -> None:
    x = normal(1, N_TOKENS, N_STREAM * N)
    first = x[:, :N].copy()
    run_job(spread_streams, stream_args(x), N_TOKENS)
    assert np.array_equal(x, np.tile(first, N_STREAM))


@pytest.mark.parametrize("by_token", [False, True])
def test_a_result_returns_by_gates(by_token: bool) -> None:
    """Two rows of a step, tokens 3 and 1; the gates are those of the rows, or of all tokens."""
    x, delta, inject = normal(1, N_TOKENS, N_STREAM * N), normal(2, 2, N), normal(3, N_TOKENS, 4)
    tokens = np.array([3, 1], np.int32)
    before, gates = x.copy(), inject[tokens] if by_token else inject[:2]
    added = 2 * sigmoid(gates / N_STREAM)[:, :, None] * delta[:, None]
    args = stream_args(
        x, tokens=tokens, delta=delta, returning=GATED, returns=inject,
        returns_by_token=by_token, kind=NO_STREAMS,
    )  # fmt: skip
    run_job(enter_streams, args, 2)
    expected = before[tokens] + added.reshape(2, -1)
    assert np.abs(x[tokens] - expected).max() < 1e-5
    assert np.array_equal(x[[0, 2, 4]], before[[0, 2, 4]])


def test_a_result_returns_by_a_matrix_and_the_mean_is_read() -> None:
    x, delta = normal(1, N_TOKENS, N_STREAM * N), normal(2, N_TOKENS, N)
    factors, norm = normal(3, N_TOKENS, N_STREAM * (1 + N_STREAM)), 1 + normal(4, N) / 5
    r, out = x.reshape(N_TOKENS, N_STREAM, N).copy(), np.zeros((N_TOKENS, N), np.float32)
    post, matrix = factors[:, :N_STREAM], factors[:, N_STREAM:].reshape(-1, N_STREAM, N_STREAM)
    expected = post[:, :, None] * delta[:, None] + np.einsum("tfo,tfe->toe", matrix, r)
    args = stream_args(
        x, delta=delta, returning=SINKHORN, returns=factors, kind=MEAN, norm=norm, out_f32=out
    )
    run_job(enter_streams, args, N_TOKENS)
    assert np.abs(x.reshape(expected.shape) - expected).max() < 1e-5
    assert np.abs(out - rms(expected.mean(axis=1)) * norm).max() < 1e-5


def test_the_mixing_matrix_is_nearly_doubly_stochastic() -> None:
    x = normal(1, N_TOKENS, N_STREAM * N)
    n_mix, epsilon = N_STREAM * (N_STREAM + 2), 1e-6
    mix, base, scale = normal(2, N_TOKENS, n_mix), normal(3, n_mix), 1 + normal(4, 3) / 5
    norm, out = 1 + normal(5, N) / 5, np.zeros((N_TOKENS, N), np.float32)
    pre = sigmoid(mix[:, :N_STREAM] * scale[0] + base[:N_STREAM]) + epsilon
    post = 2 * sigmoid(mix[:, N_STREAM:8] * scale[1] + base[N_STREAM:8])
    args = stream_args(
        x, kind=SINKHORN, mix=mix, mix_base=base, mix_scale=scale, n_iterations=20,
        epsilon=epsilon, norm=norm, out_f32=out,
    )  # fmt: skip
    run_job(sinkhorn_input, args, N_TOKENS)
    matrix = mix[:, 8:].reshape(N_TOKENS, N_STREAM, N_STREAM)
    assert np.abs(matrix.sum(axis=1) - 1).max() < 1e-4
    assert np.abs(matrix.sum(axis=2) - 1).max() < 1e-2
    assert np.abs(mix[:, N_STREAM:8] - post).max() < 1e-5
    read = (pre[:, :, None] * x.reshape(N_TOKENS, N_STREAM, N)).sum(axis=1)
    assert np.abs(out - rms(read) * norm).max() < 1e-5


def test_memory_rows_are_gated_by_each_stream() -> None:
    x, key = normal(1, N_TOKENS, N_STREAM * N), normal(2, N_TOKENS, N_STREAM * N)
    key[0] = 0  # no similarity: half open
    value = normal(3, N_TOKENS, N)
    norms = [1 + normal(seed, N_STREAM * N) / 5 for seed in (4, 5, 6)]
    out, before = np.zeros_like(x), x.copy().reshape(N_TOKENS, N_STREAM, N)
    shape = (N_STREAM, N)
    keys = rms(key.reshape(before.shape)) * norms[0].reshape(shape)
    d = (keys * rms(before) * norms[1].reshape(shape)).sum(axis=2) / np.sqrt(N)
    gate = sigmoid(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6)))
    gated = gate[:, :, None] * value[:, None]
    room = np.zeros(N, np.float32)
    args = job_args(
        NGRAM_MEMORY, x=x, x_stride=x.strides[0], n=N, n_stream=N_STREAM, key=key,
        key_stride=key.strides[0], value=value, value_stride=value.strides[0], key_norm=norms[0],
        query_norm=norms[1], conv_norm=norms[2], out=out, out_stride=out.strides[0], scratch=room,
        eps=EPS,
    )  # fmt: skip
    run_job(gate_memory, args, N_TOKENS)
    assert gate[0].tolist() == [0.5] * N_STREAM
    assert np.abs(x - (before + gated).reshape(x.shape)).max() < 1e-5
    assert np.abs(out - (rms(gated) * norms[2].reshape(shape)).reshape(x.shape)).max() < 1e-4
