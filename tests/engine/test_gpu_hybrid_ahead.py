"""Steps that miss experts run ahead: the same tokens, and slots are never taken from under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import Step, StepKind
from runtime.errors import ExchangeStalled
from runtime.experts import exchange
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, step_of
from tests.engine.test_gpu_hybrid import ALL, hybrid_driver
from tests.engine.test_gpu_sampling import following, sampled, samplers_of
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_STEPS = 5
SAMPLERS = [{"seed": 5, "temperature": 1.5}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("ahead") / "model.gguf"
    with open_model(BLOCK_MODELS["qwen3moe"]("Q4_K", 2).write(path)) as model:
        yield model


def steps_of(executor: GPUExecutor, n_steps: int = N_STEPS) -> list[Step]:
    """A token that is known and those that follow it, each of what the one before chose."""
    (sampler,) = samplers_of(SAMPLERS)
    first = sampled(executor, step_of(executor, StepKind.DECODE, [(0, TOKENS[:1], 0)]), [sampler])
    return [
        first,
        *(
            sampled(executor, following(executor, [0], position), [sampler])
            for position in range(1, n_steps)
        ),
    ]


async def chosen_ahead(executor: GPUExecutor, n_steps: int = N_STEPS) -> list[int]:
    """Tokens of the steps, each launched before the one before it has ended."""
    steps = steps_of(executor, n_steps)
    flight, tokens = await executor.begin(steps[0]), []
    for step in steps[1:]:
        behind = await executor.begin(step)
        result = await flight.result()
        assert result.chosen is not None
        tokens += result.chosen.tokens
        flight = behind
    result = await flight.result()
    assert result.chosen is not None
    return tokens + result.chosen.tokens


async def test_tokens_are_those_of_a_resident_model(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")
    monkeypatch.setenv("LLAMA_MOE_CACHE_ADMIT", "0")
    tokens = []
    for slots in (ALL, 3):
        settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
        async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
            assert executor.runs_ahead
            tokens.append(await chosen_ahead(executor))
            facts = executor.describe()
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1, "a token that repeats proves little"
    served = [facts[f"expert_{kind}"] for kind in ("hits", "cpu_misses")]
    n_used = 2 * model.spec.layers[0].feed_forward.n_used
    assert sum(served) == N_STEPS * n_used and min(served) > 0
    assert facts["expert_uploads"] > 0


async def test_a_step_behind_one_that_stalled_is_lost_too(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = partial(exchange.ExchangeSizes, patience_ns=20_000)
    monkeypatch.setattr(exchange, "ExchangeSizes", sizes)
    settings = {"moe_expert_cache": 0, "n_threads": 2, "exchange_rounds": 0}
    async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
        first, second = steps_of(executor)[:2]
        with silent_team(executor):
            flights = [await executor.begin(first), await executor.begin(second)]
            for flight in flights:
                with pytest.raises(ExchangeStalled, match="layer 0"):
                    await flight.result()
        flight = await executor.begin(replace(first, token_ids=np.array([7], np.int32)))
        assert (await flight.result()).chosen is not None


@contextmanager
def silent_team(executor: GPUExecutor) -> Iterator[None]:
    """Inside, the workers get no program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._parts.exchange, "begin", lambda epoch, *, behind: None)
        yield
