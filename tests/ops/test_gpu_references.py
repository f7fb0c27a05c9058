"""What the GPU's router is held against is what the CPU's computes, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from ops.cpu.router import ROUTE, route
from ops.gpu.router import route_reference
from tests.support.cases.case import same_bits
from tests.support.cases.router import SMALL, logits_of
from tests.support.jobs import job_args, run_job


@pytest.mark.parametrize("name", SMALL)
def test_choices_and_weights_are_those_of_the_cpu(name: str) -> None:
    setting = SMALL[name]
    logits, routing, n = logits_of(setting), setting.routing, setting.n_expert
    bias = np.random.default_rng(1).normal(size=n).astype(np.float32) if setting.biased else None
    choices = np.zeros((len(logits), routing.n_used), np.int32)
    weights = np.zeros((len(logits), routing.n_used), np.float32)
    scratch = np.zeros((3, n), np.float32)
    args = job_args(
        ROUTE, logits=logits, logits_stride=4 * n, n_expert=n, n_used=routing.n_used,
        score=routing.score, n_groups=routing.n_groups, n_groups_used=routing.n_groups_used,
        renormalise=routing.renormalise, scale=routing.scale, choices=choices, weights=weights,
        scratch=scratch, **({} if bias is None else {"bias": bias}),
    )  # fmt: skip
    run_job(route, args, len(logits))
    expected, expected_weights = route_reference(logits, routing, bias)
    assert np.array_equal(choices, expected)
    assert same_bits(weights, expected_weights)
