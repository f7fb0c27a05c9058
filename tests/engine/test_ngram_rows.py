"""Rows of n-gram tables for steps of few tokens: not by way of NumPy, nor of a thread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine import ngram_rows
from runtime.engine.ngram_rows import NgramRows, contexts_of
from runtime.engine.step import Step, StepKind
from runtime.models import open_model
from runtime.models.mapped_file import MappedFile, are_pages_here
from runtime.models.ngram_memory import FEW_TOKENS
from tests.support.tiny_recurrent_models import qwen4exp

TOKENS = np.random.default_rng(4).integers(0, 96, 2 * FEW_TOKENS).astype(np.int32)


def step_of(first: int, n: int) -> Step:
    """A token of each of n sequences, each with those of TOKENS before it."""
    tokens = TOKENS[first : first + n]
    before = [[TOKENS[first + i - 1 - j] for j in range(2)] for i in range(n)]
    each = np.arange(n, dtype=np.int32)
    page_tables = np.zeros((n, 1), np.int32)
    previous = np.array(before, np.int32)
    return Step(
        StepKind.DECODE, tokens, each, each, page_tables, each,
        state_slots=each, previous_tokens=previous,
    )  # fmt: skip


async def test_few_tokens_have_the_rows_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are in memory are taken at once, others on a thread."""
    threads = 0
    to_thread = asyncio.to_thread

    async def counted(*args: Any) -> Any:
        nonlocal threads
        threads += 1
        return await to_thread(*args)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    with open_model(qwen4exp().write(tmp_path / "model.gguf")) as model:
        memory = next(layer.memory for layer in model.spec.layers if layer.memory is not None)
        weight = model.weights[memory.table]
        table = NgramRows(memory, weight)
        many = await table.blocks(step_of(2, FEW_TOKENS + 1))
        assert threads == 1
        weight.data.sum()  # its pages are in memory
        few = [await table.blocks(step_of(2 + i, 3)) for i in range(0, FEW_TOKENS, 3)]
        assert threads == 1
        assert np.array_equal(np.concatenate(few), many)
        monkeypatch.setattr(ngram_rows, "are_pages_here", lambda *_: False)
        assert np.array_equal(await table.blocks(step_of(2, 3)), few[0])
        assert threads == 2


def test_contexts_of_a_token_of_each_sequence() -> None:
    contexts = contexts_of(step_of(5, 3), 3)
    assert contexts.tolist() == [TOKENS[[i, i - 1, i - 2]].tolist() for i in (5, 6, 7)]
    assert np.array_equal(contexts, contexts_of(step_of(5, FEW_TOKENS + 3), 3)[:3])


def test_pages_are_in_memory_or_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 12))
    file = MappedFile(path)
    file.map()
    file.view(0, 3 << 12).sum()
    assert are_pages_here(file.address + 4000, 200)
    assert not are_pages_here(1 << 12, 1)  # nobody's
    file.close()
