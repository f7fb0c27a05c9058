"""Models with n-gram tables run ahead where the CPU team gathers the rows: the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runtime.cuda.graph import Graph
from runtime.engine.gpu import table_rows
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import Step, StepKind
from runtime.errors import ExchangeStalled
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import executor_of, step_of
from tests.engine.test_gpu_hybrid import ALL, hybrid_driver
from tests.engine.test_gpu_hybrid_ahead import SAMPLERS
from tests.engine.test_gpu_sampling import sampled, samplers_of
from tests.engine.test_gpu_two import gpus
from tests.support.tiny_recurrent_models import qwen4exp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROMPTS = np.random.default_rng(9).integers(0, 96, (2, 1)).astype(np.int32)
N_STEPS = 3
LAYERS = (1, 3)
"""That with the table, and one with attention."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("rows_ahead") / "model.gguf"
    with open_model(qwen4exp().write(path)) as model:
        model.spec = replace(model.spec, layers=tuple(model.spec.layers[i] for i in LAYERS))
        yield model


def step_behind(executor: GPUExecutor, texts: list[list[int]], *, follows: bool) -> Step:
    """The next token of each text: the last that is known, or the one that is chosen now."""
    n = len(texts[0]) - (not follows)
    tokens = [[-1 - row] if follows else text[n:] for row, text in enumerate(texts)]
    parts = [(row, np.array(ids, np.int32), n) for row, ids in enumerate(tokens)]
    step = step_of(executor, StepKind.DECODE, parts)
    n_previous = executor.limits.n_previous
    before = [([-1] * n_previous + text[:n])[: -n_previous - 1 : -1] for text in texts]
    step = replace(step, previous_tokens=np.array(before, np.int32), follows=follows)
    return sampled(executor, step, samplers_of(SAMPLERS * len(texts)))


async def chosen(executor: GPUExecutor, *, ahead: bool) -> list[list[int]]:
    """The prompts' tokens, and what is chosen behind them."""
    texts = PROMPTS.tolist()
    flight = await executor.begin(step_behind(executor, texts, follows=False))
    for index in range(N_STEPS):
        behind = None
        if ahead and index + 1 < N_STEPS:
            behind = await executor.begin(step_behind(executor, texts, follows=True))
        result = await flight.result()
        assert result.chosen is not None
        for text, token in zip(texts, result.chosen.tokens, strict=True):
            text.append(token)
        if not ahead and index + 1 < N_STEPS:
            behind = await executor.begin(step_behind(executor, texts, follows=False))
        flight = behind or flight
    return texts


@pytest.fixture(scope="module")
def expected(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """By steps that begin when the one before is known, with all experts on the GPU."""

    async def one_by_one() -> list[list[int]]:
        settings = {"n_threads": 2, "exchange_rounds": 0, "moe_expert_cache": ALL}
        path = tmp_path_factory.mktemp("cubins")
        async with executor_of(model, path, hybrid_driver(), **settings) as executor:
            return await chosen(executor, ahead=False)

    return asyncio.run(one_by_one())


@pytest.mark.parametrize(("n_gpus", "slots"), [(1, ALL), (1, 3), (2, 3)])
async def test_tokens_are_those_of_steps_one_by_one(
    n_gpus: int, slots: int, model: Model, expected: list[list[int]], tmp_path: Path
) -> None:
    settings = {"n_threads": 2, "exchange_rounds": 0, "moe_expert_cache": slots}
    driver = gpus(n_gpus) if n_gpus > 1 else hybrid_driver()
    async with executor_of(model, tmp_path, driver, split=n_gpus > 1, **settings) as executor:
        assert await chosen(executor, ahead=True) == expected
    assert len({token for text in expected for token in text[1:]}) > 2, "repeats prove little"


async def test_rows_that_do_not_come_lose_the_step(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = partial(table_rows.TableRows, patience_ns=20_000)
    monkeypatch.setattr(table_rows, "TableRows", rows)
    settings = {"n_threads": 2, "exchange_rounds": 0, "moe_expert_cache": ALL}
    async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
        step = step_behind(executor, PROMPTS.tolist(), follows=False)
        with monkeypatch.context() as patch:
            patch.setattr(executor._parts.memories._rows, "begin", lambda *_: None)
            with pytest.raises(ExchangeStalled, match="rows of an n-gram table"):
                await executor.run(step)
        assert (await executor.run(step)).chosen is not None


async def test_closing_lets_workers_go_that_a_lost_step_keeps(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"n_threads": 2, "exchange_rounds": 0, "moe_expert_cache": 3}
    async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
        texts = PROMPTS.tolist()
        monkeypatch.setattr(Graph, "launch", lambda *_: None)  # the GPU does nothing any more
        await executor.begin(step_behind(executor, texts, follows=False))
        await executor.begin(step_behind(executor, texts, follows=True))
        executor._given_up = True
