"""RMS norm with what is fused into it, and the sums of expert outputs."""

from __future__ import annotations

import numpy as np
import pytest

from ops.arithmetic import activation_layout, combine, quantize_rows
from ops.cpu.norm import NORM, QUANTIZE, norm, quantize
from ops.cpu.program import aligned
from tests.support.jobs import job_args, run_job

EPS = 1e-5


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("n", [16, 50, 64, 256, 2880])
def test_norm_adds_the_residual_and_stores_every_form(n: int) -> None:
    rng = np.random.default_rng(n)
    x, delta = rng.normal(size=(2, 5, n)).astype(np.float32)
    weight = rng.normal(size=n).astype(np.float32)
    kinds = [kind for kind, group in (("q8_256", 256), ("q8_32", 32)) if n % group == 0]
    records = {k: _room(5, activation_layout(k, n)[2]) for k in kinds}
    fields = {}
    for kind, room in records.items():
        fields |= {f"out_{kind}": room, f"out_{kind}_stride": room.strides[0]}
    out, stream = np.empty_like(x), x.copy()
    args = job_args(
        NORM, x=stream, x_stride=4 * n, n=n, delta=delta, delta_stride=4 * n, weight=weight,
        eps=EPS, out_f32=out, out_f32_stride=4 * n, **fields,
    )  # fmt: skip
    run_job(norm, args, 5)
    assert np.array_equal(stream, x + delta)
    assert np.allclose(out, rms_norm(x + delta, weight), rtol=2e-6, atol=1e-6)
    for kind, room in records.items():
        assert np.array_equal(room, quantize_rows(kind, out))


def _room(n_rows: int, row_bytes: int) -> np.ndarray:
    return aligned((n_rows, row_bytes), np.uint8)


def test_norm_of_chosen_tokens_only() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 32)).astype(np.float32)
    delta = np.array([[1], [2]], np.float32) * np.ones((2, 32), np.float32)
    weight, out = np.ones(32, np.float32), np.zeros((2, 32), np.float32)
    stream, tokens = x.copy(), np.array([4, 1], np.int32)
    args = job_args(
        NORM, x=stream, x_stride=128, n=32, tokens=tokens, delta=delta, delta_stride=128,
        weight=weight, eps=EPS, out_f32=out, out_f32_stride=128,
    )  # fmt: skip
    run_job(norm, args, 2)
    assert np.array_equal(stream[tokens], x[tokens] + delta)
    assert np.array_equal(stream[[0, 2, 3, 5]], x[[0, 2, 3, 5]])
    assert np.allclose(out, rms_norm(stream[tokens], weight), atol=1e-6)


@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_experts_are_added_in_the_routers_order(shared: str) -> None:
    """The bits of `ops.arithmetic.combine`."""
    rng = np.random.default_rng(2)
    n_tokens, k, n = 3, 4, 50
    x = rng.normal(size=(n_tokens, n)).astype(np.float32)
    outputs = rng.normal(size=(n_tokens * k, n)).astype(np.float32)
    slots = rng.permutation(n_tokens * k).astype(np.int32).reshape(n_tokens, k)
    weights = rng.random((n_tokens, k), np.float32)
    shared_out = rng.normal(size=(n_tokens, n)).astype(np.float32)
    gates = rng.random(n_tokens, np.float32) if shared == "gated" else np.ones(n_tokens, np.float32)
    fields = {} if shared == "none" else {"shared": shared_out, "shared_stride": 4 * n}
    if shared == "gated":
        fields["shared_weights"] = gates
    stream, room = x.copy(), np.full((n_tokens, n), np.nan, np.float32)
    args = job_args(
        NORM, x=stream, x_stride=4 * n, n=n, expert_out=outputs, expert_stride=4 * n, slots=slots,
        weights=weights, n_used=k, moe_sum=room, moe_sum_stride=4 * n, eps=EPS, **fields,
    )  # fmt: skip
    run_job(norm, args, n_tokens)
    rows = outputs[slots]
    if shared != "none":
        rows = np.concatenate([rows, shared_out[:, None]], 1)
        weights = np.concatenate([weights, gates[:, None]], 1)
    assert np.array_equal(stream, combine(weights, rows, x))


def test_quantize_is_the_contract() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 512)).astype(np.float32)
    x[1, 256:] = 0
    wide, narrow = (_room(3, activation_layout(kind, 512)[2]) for kind in ("q8_256", "q8_32"))
    args = job_args(
        QUANTIZE, x=x, x_stride=2048, n=512, out_q8_256=wide, out_q8_256_stride=wide.strides[0],
        out_q8_32=narrow, out_q8_32_stride=narrow.strides[0],
    )  # fmt: skip
    run_job(quantize, args, 3)
    assert np.array_equal(wide, quantize_rows("q8_256", x))
    assert np.array_equal(narrow, quantize_rows("q8_32", x))
