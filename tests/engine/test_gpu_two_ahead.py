"""Steps of several GPUs run ahead: the first one fetches the tokens that the last one chose."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.engine.gpu import links
from runtime.engine.gpu.executor import GPUExecutor
from runtime.errors import HandOverStalled
from runtime.models import open_model
from tests.engine.test_gpu_hybrid_ahead import chosen_ahead, steps_of
from tests.engine.test_gpu_two import gpus, split_over, streams_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.quantized import q8_0
from tests.support.tiny_recurrent_models import qwen35

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_STEPS = 3
ALL = 8
"""Experts of a layer."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_ahead")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 3).write(directory / "model.gguf")


async def chosen_one_by_one(executor: GPUExecutor) -> list[int]:
    """Tokens of steps that begin when the one before is known."""
    tokens: list[int] = []
    for step in steps_of(executor, N_STEPS):
        known = step
        if tokens:
            known = replace(step, token_ids=np.array(tokens[-1:], np.int32), follows=False)
        result = await (await executor.begin(known)).result()
        assert result.chosen is not None
        tokens += result.chosen.tokens
    return tokens


async def test_tokens_are_those_of_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two through each other's memory; of three through the host's, and with missed experts."""
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")
    monkeypatch.setenv("LLAMA_MOE_CACHE_ADMIT", "0")
    with open_model(path) as model:
        async with split_over(model, tmp_path, gpus(1)) as executor:
            expected = await chosen_one_by_one(executor)
        for n, slots in ((2, ALL), (3, 3)):
            fake = gpus(n, peers=n == 2)
            async with split_over(model, tmp_path, fake, moe_expert_cache=slots) as executor:
                assert executor.runs_ahead
                assert await chosen_ahead(executor, N_STEPS) == expected
                facts = executor.describe()
            assert facts["gpu"] == ", ".join(f"Fake GPU {i}" for i in range(n))
            assert bool(facts.get("expert_cpu_misses")) == (slots < ALL)
    assert len(set(expected)) > 1, "a token that repeats proves little"


async def test_states_move_ahead(tmp_path: Path) -> None:
    with open_model(q8_0(qwen35()).write(tmp_path / "model.gguf")) as model:
        async with split_over(model, tmp_path, gpus()) as executor:
            assert executor.runs_ahead and executor.limits.n_state_slots
            expected = await chosen_one_by_one(executor)
            assert await chosen_ahead(executor, N_STEPS) == expected


async def test_a_step_behind_one_that_stalled_is_lost_too(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU gives up in both before the host looks; the next step is whole."""
    monkeypatch.setattr(links, "PATIENCE_NS", 2_000)
    fake = gpus()
    with open_model(path) as model:
        async with split_over(model, tmp_path, fake) as executor:
            steps = steps_of(executor, 2)
            first, _ = streams_of(executor)
            with fake.hold(first):
                flights = [await executor.begin(step) for step in steps]
                await asyncio.sleep(0)
            for flight in flights:
                with pytest.raises(HandOverStalled, match="did not get the step from GPU 0"):
                    await flight.result()
            monkeypatch.undo()
            tokens = await chosen_one_by_one(executor)
            assert await chosen_ahead(executor, N_STEPS) == tokens
