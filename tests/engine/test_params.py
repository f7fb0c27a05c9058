"""SamplingParams: limits, normal forms, defaults of a model file."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest

from runtime.engine.params import SamplingParams, defaults_from_metadata
from runtime.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -2),
        ("max_tokens", 1.5),
        ("max_tokens", "8"),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", math.nan),
        ("top_k", 1.5),
        ("repeat_penalty", 0),
        ("repeat_penalty", math.inf),
        ("repeat_last_n", -1),
        ("frequency_penalty", math.inf),
        ("presence_penalty", None),
        ("dry_multiplier", -0.5),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -1),
        ("dry_sequence_breakers", [1]),
        ("adaptive_decay", 1.0),
        ("min_keep", -1),
        ("n_probs", -1),
        ("seed", "x"),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("samplers", 3),
        ("ignore_eos", 1),
        ("logit_bias", 3),
        ("logit_bias", "3"),
        ("logit_bias", [[1]]),
        ("logit_bias", [[1.5, 2]]),
        ("logit_bias", [[1, "x"]]),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: True}),
    ],
)
def test_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "becomes"),
    [
        ("temperature", -1, 0.0),
        ("top_k", -5, 0),
        ("top_k", 40.0, 40),
        ("top_k", 10**30, 2**31 - 1),
        ("top_p", 1.5, 1.0),
        ("min_p", -0.1, 0.0),
        ("xtc_probability", 2, 1.0),
        ("mirostat", 7, 2),
        ("adaptive_target", 1.5, 1.0),
        ("dry_base", 0.5, 1.75),
        ("max_tokens", -1, None),
        ("seed", 2**32 - 1, -1),
        ("seed", 2**40 + 5, 5),
        ("seed", 10**400, 10**400 % 2**32),
        ("stop", "end", ("end",)),
        ("stop", ["a", "", "b"], ("a", "b")),
        ("samplers", "kpt", ("top_k", "top_p", "temperature")),
        ("samplers", ["Top-K", "topp", "temp", "nucleus"],
         ("top_k", "top_p", "temperature", "top_p")),
        ("logit_bias", {"a": 1, 5: False}, (("a", 1.0), (5, -math.inf))),
        ("logit_bias", [[5, -math.inf]], ((5, -math.inf),)),
    ],
)  # fmt: skip
def test_normalized(field: str, value: object, becomes: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == becomes


def test_replace_keeps_and_checks() -> None:
    params = SamplingParams(stop="x", logit_bias={4: False}, samplers="kt", max_tokens=-1)
    assert dataclasses.replace(params) == params
    with pytest.raises(RequestError):
        dataclasses.replace(params, min_keep=-1)


def test_unknown_samplers_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(samplers=["top_k", "tfs_z"]).samplers == ("top_k",)
        assert SamplingParams(samplers="kf").samplers == ("top_k",)
    assert "tfs_z" in caplog.text and "'f'" in caplog.text


def test_defaults_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    assert defaults_from_metadata({}) == SamplingParams()
    params = defaults_from_metadata(
        {
            "general.sampling.temp": 0.7,
            "general.sampling.top_p": 0.9,
            "general.sampling.penalty_repeat": 1.1,
            "general.sampling.penalty_last_n": 32,
            "general.sampling.sequence": "top_k;temperature",
            "general.sampling.mirostat_tau": "broken",
        }
    )
    assert params == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        repeat_penalty=1.1,
        repeat_last_n=32,
        samplers=("top_k", "temperature"),
    )
    assert "mirostat_tau" in caplog.text


def test_greedy() -> None:
    assert SamplingParams.greedy(max_tokens=3).temperature == 0.0
    assert SamplingParams.greedy(max_tokens=3).max_tokens == 3
