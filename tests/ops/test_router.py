"""Routing: choice, weights and the lists of tokens by expert."""

from __future__ import annotations

import numpy as np
import pytest

from ops.cpu.router import GROUP, ROUTE, SIGMOID, SOFTMAX, SOFTMAX_SELECTED, group, route
from tests.support.jobs import job_args, run_job

FLOOR = 2.0**-14


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def expected_route(
    logits: np.ndarray,
    k: int,
    score: int,
    bias: np.ndarray | None,
    renormalise: bool,
    groups: tuple,
) -> tuple[np.ndarray, np.ndarray]:
    wide = logits.astype(np.float64)
    p = {SOFTMAX: softmax, SIGMOID: lambda z: 1 / (1 + np.exp(-z)), SOFTMAX_SELECTED: lambda z: z}[
        score
    ](wide)
    selection = p if bias is None else p + bias
    n_groups, n_used = groups
    if n_groups > 1:
        split = selection.reshape(len(p), n_groups, -1)
        best = np.argsort(-np.sort(split, -1)[..., -2:].sum(-1), axis=1, kind="stable")[:, :n_used]
        keep = np.zeros(split.shape[:2], bool)
        np.put_along_axis(keep, best, True, 1)
        selection = np.where(keep[..., None], split, -np.inf).reshape(p.shape)
    choices = np.argsort(-selection, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(p, choices, 1)
    if score == SOFTMAX_SELECTED:
        weights = softmax(weights)
    elif renormalise:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), FLOOR)
    return choices, weights


def run_route(logits: np.ndarray, k: int, **fields: object) -> tuple[np.ndarray, np.ndarray]:
    n_tokens, n = logits.shape
    scratch = np.zeros((3, n), np.float32)
    choices, weights = np.zeros((n_tokens, k), np.int32), np.zeros((n_tokens, k), np.float32)
    fields = {"n_groups": 1, "n_groups_used": 1, "scale": 1.0} | fields
    args = job_args(
        ROUTE, logits=logits, logits_stride=4 * n, n_expert=n, n_used=k, choices=choices,
        weights=weights, scratch=scratch, **fields,
    )  # fmt: skip
    run_job(route, args, n_tokens)
    return choices, weights


@pytest.mark.parametrize("score", [SOFTMAX, SIGMOID, SOFTMAX_SELECTED])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_route(score: int, renormalise: bool, biased: bool, groups: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(40, 32)) * 3).astype(np.float32)
    bias = rng.normal(size=32).astype(np.float32) if biased else None
    fields = {} if bias is None else {"bias": bias}
    choices, weights = run_route(
        logits, 6, score=score, renormalise=renormalise, scale=2.5,
        n_groups=groups[0], n_groups_used=groups[1], **fields,
    )  # fmt: skip
    expected, expected_weights = expected_route(logits, 6, score, bias, renormalise, groups)
    assert np.array_equal(choices, expected)
    assert np.allclose(weights, 2.5 * expected_weights, rtol=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, [2, 6]] = 1
    choices, _ = run_route(logits, 5)
    assert choices[0].tolist() == [2, 6, 0, 1, 3]


def test_a_tiny_sum_is_floored() -> None:
    logits = np.full((1, 4), -60, np.float32)
    _, weights = run_route(logits, 2, score=SIGMOID, renormalise=1)
    assert np.allclose(weights, np.exp(-60.0) / FLOOR, rtol=1e-4)


def test_logits_that_are_nan_stay_within_the_experts() -> None:
    choices, weights = run_route(np.full((1, 8), np.nan, np.float32), 3)
    assert ((choices >= 0) & (choices < 8)).all()
    assert np.isnan(weights).all()


@pytest.mark.parametrize("n_tokens", [1, 2, 33])
def test_group_sorts_by_expert_then_token(n_tokens: int) -> None:
    rng = np.random.default_rng(n_tokens)
    k, n_expert = 3, 8
    choices = np.array([rng.permutation(n_expert)[:k] for _ in range(n_tokens)], np.int32)
    active, offsets = np.zeros(2 * n_expert, np.int32), np.zeros(n_expert + 1, np.int32)
    slots, slot_tokens = np.zeros((n_tokens, k), np.int32), np.zeros(n_tokens * k, np.int32)
    chunks, count = np.zeros(2, np.int64), np.array([n_tokens], np.int64)
    counts = np.zeros(n_expert, np.int32)
    args = job_args(
        GROUP, choices=choices, n_tokens=count, n_used=k, n_expert=n_expert,
        counts=counts, active=active, offsets=offsets, slots=slots,
        slot_tokens=slot_tokens, gate_up_chunks=chunks, down_chunks=chunks[1:], gate_up_shared=2,
        gate_up_per_expert=3, down_shared=1, down_per_expert=5,
    )  # fmt: skip
    run_job(group, args, 1)
    used = np.unique(choices)
    assert active[: len(used)].tolist() == used.tolist()
    assert chunks.tolist() == [2 + 3 * len(used), 1 + 5 * len(used)]
    for i, expert in enumerate(used):
        tokens = np.flatnonzero((choices == expert).any(1))
        assert slot_tokens[offsets[i] : offsets[i + 1]].tolist() == tokens.tolist()
        assert slots[choices == expert].tolist() == list(range(offsets[i], offsets[i + 1]))
