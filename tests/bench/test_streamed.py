"""`python -m bench streamed` and the routing of `agree`: what they reckon."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from bench.agree import Choices, routing
from bench.streamed import speeds


def test_a_prompt_is_compared_with_what_the_link_could_do() -> None:
    row = speeds(4096, [1.0, 0.5, 2.0], fetched=25_000_000_000, link=50e9, part=0.25)
    assert row["tokens_per_second"] == 4096 and row["whole_model_tokens_per_second"] == 1024
    assert row["link_bound_tokens_per_second"] == 8192 and row["share_of_link_bound"] == 0.5
    resident = speeds(100, [1.0], fetched=0, link=50e9, part=1.0)
    assert "share_of_link_bound" not in resident


def choices_of(*steps: Any) -> Choices:
    choices = Choices()
    for step in steps:
        choices.record(cast(Any, None), np.array(step, np.int32))
    return choices


def test_tokens_whose_experts_differ_are_told_from_the_others() -> None:
    """Two layers; the order of a token's experts does not matter, -1 is not known."""
    prompt = [[[1, 2], [3, 4]], [[5, 6], [-1, -1]]]
    a = choices_of(prompt, [[[1, 2]], [[3, 4]]], [[[1, 2]], [[3, 4]]])
    b = choices_of(prompt, [[[2, 1]], [[4, 3]]], [[[1, 7]], [[3, 4]]])
    row = routing(a, b, np.array([1e-6, 2e-6, 0.25]))
    assert row is not None
    assert (row["choices"], row["that_differ"], row["tokens_that_differ"]) == (7, 1, 1)
    assert row["largest_error_of_equal_tokens"] == 2e-6 and row["largest_error_of_others"] == 0.25


@pytest.mark.parametrize("other", [choices_of(), choices_of([[[1, 2]]])])
def test_choices_that_nobody_saw_are_not_compared(other: Choices) -> None:
    assert routing(choices_of([[[1, 2], [3, 4]]]), other, np.zeros(1)) is None
