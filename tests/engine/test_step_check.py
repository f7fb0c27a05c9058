"""Steps that name what does not exist are refused, whether they have one token or many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.step_check import FEW, StepCheck
from runtime.engine.step import DeviceWork, Step, StepKind
from runtime.errors import EngineBug

N_VOCAB, N_PAGES, PAGE_TOKENS, N_TOKENS = 50, 20, 4, 40
CHECK = StepCheck(ExecutorLimits(N_VOCAB, N_PAGES, PAGE_TOKENS, N_TOKENS, 2), None)
WORK = DeviceWork(1, np.empty(0), np.empty(0), None)


def step_of(n_tokens: int, first: int = 5) -> Step:
    """Tokens of the second of two sequences, whose pages run backwards."""
    tables = np.stack([np.arange(15), 19 - np.arange(15)]).astype(np.int32)
    positions = np.arange(first, first + n_tokens, dtype=np.int32)
    rows = np.ones(n_tokens, np.int32)
    return Step(StepKind.PREFILL, positions % N_VOCAB, positions, rows, tables, rows[:1] - 1)


@pytest.mark.parametrize("n_tokens", [1, 2, FEW + 1])
def test_the_pages_of_tokens_are_named(n_tokens: int) -> None:
    cells = CHECK.cells(step_of(n_tokens), None)
    assert cells.dtype == np.int32
    assert cells.tolist() == [19 - at // PAGE_TOKENS for at in range(5, 5 + n_tokens)]


@pytest.mark.parametrize("n_tokens", [1, 2, FEW + 1])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", N_VOCAB),
        ("token_ids", -1),
        ("positions", 15 * PAGE_TOKENS),
        ("positions", -1),
        ("rows", 2),
        ("output_tokens", N_TOKENS),
        ("page_tables", N_PAGES),
        ("page_tables", -1),
    ],
)
def test_what_does_not_exist_is_refused(n_tokens: int, field: str, value: int) -> None:
    values = getattr(step_of(n_tokens), field).copy()
    values.reshape(-1)[-15 if field == "page_tables" else -1] = value
    wrong: Any = {field: values}
    first = 0 if field == "page_tables" else 5
    with pytest.raises(EngineBug):
        CHECK.cells(replace(step_of(n_tokens, first), **wrong), None)


def test_a_step_follows_outputs_that_were_there() -> None:
    last = replace(step_of(2), sampling=(WORK,))
    for token, right in ((-1, True), (-2, False), (0, False)):
        ids = np.array([token], np.int32)
        step = replace(step_of(1), token_ids=ids, follows=True)
        if right:
            CHECK.cells(step, last)
            continue
        with pytest.raises(EngineBug):
            CHECK.cells(step, last)
