"""The cache of experts grows and shrinks between steps, and no bit changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.config import EngineConfig
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.expert_plan import Holding
from runtime.engine.gpu.settings import MARGIN_BYTES
from runtime.engine.open_engine import open_engine
from runtime.engine.step import F32, StepKind
from runtime.errors import ConfigError
from runtime.models import open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETTINGS: dict[str, Any] = {
    "n_ctx": 256,
    "max_sequences": 2,
    "max_step_tokens": 8,
    "n_threads": 1,
    "exchange_rounds": 0,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resize")
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(directory / "model.gguf")


def driver() -> FakeDriver:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.host = lambda: time.sleep(0)
    return fake


async def answers(executor: GPUExecutor) -> F32:
    """Logits of a prompt's last token, and of one behind it."""
    prompt = step_of(executor, StepKind.PREFILL, [(1, TOKENS[:2], 0)], [1])
    token = step_of(executor, StepKind.DECODE, [(1, TOKENS[2:3], 2)])
    return np.concatenate([await logits_of(executor, step) for step in (prompt, token)])


def limit_for(executor: GPUExecutor, slots: float) -> int:
    """A limit on the GPU's memory that leaves room for so many experts of both layers."""
    [memory] = executor._parts.memory._parts
    share = executor.planned.shares[0]
    a_slot_each = sum(layer.experts.slot_bytes for layer in memory._layers)
    return share.dense_bytes + MARGIN_BYTES + int(slots * a_slot_each)


async def test_no_bit_changes_while_the_cache_does(path: Path, tmp_path: Path) -> None:
    """None, some, all experts, fewer again; what others took meanwhile is not there."""
    with open_model(path) as model:
        async with executor_of(model, tmp_path, driver(), **SETTINGS) as executor:
            expected = await answers(executor)
        fake = driver()
        settings = {**SETTINGS, "moe_expert_cache": 2}
        async with executor_of(model, tmp_path, fake, **settings) as executor:
            assert np.array_equal(await answers(executor), expected)
            held: dict[float, Any] = {}
            for slots in (0, 8, 2.5):
                held[slots] = await executor.resize(limit_for(executor, slots))
                facts = executor.describe()
                assert facts["expert_bytes"] == held[slots]
                assert facts["experts"] == f"{int(slots)} a layer on the GPU"
                before: Any = facts["expert_cpu_misses"]
                assert np.array_equal(await answers(executor), expected), slots
                missed: Any = executor.describe()["expert_cpu_misses"]
                assert (missed == before) == (slots == 8)
            assert held[0] == 0 < held[2.5] < held[8]
            arena = held[2.5]
            in_use = sum(fake._get("memory", handle).nbytes for handle in fake._owners)
            fake.memory_bytes = in_use - arena + MARGIN_BYTES + arena // 2
            assert 0 < await executor.resize(None) <= arena // 2
            assert np.array_equal(await answers(executor), expected)


async def test_whole_layers_stay_whole(path: Path, tmp_path: Path) -> None:
    """Where little fits, all experts of the first layer are there and none of the second."""
    with open_model(path) as model:
        async with executor_of(model, tmp_path, driver(), **SETTINGS) as executor:
            expected = await answers(executor)
            share = executor.planned.shares[0]
            expert = share.expert_bytes // 16
            limit = share.dense_bytes + MARGIN_BYTES + int(1.5 * expert)
        settings = {**SETTINGS, "vram_limit": limit}
        async with executor_of(model, tmp_path, driver(), **settings) as executor:
            assert executor.planned.experts[0].holding is Holding.LAYERS
            assert executor.planned.experts[0].slots == (1, 0)
            assert np.array_equal(await answers(executor), expected)
            await executor.resize(limit_for(executor, 5.1))
            assert executor.describe()["experts"] == "the first 10 on the GPU, layer after layer"
            table: Any = executor._parts.experts
            assert (table.cache.slot_of[0] >= 0).all()
            assert np.array_equal(await answers(executor), expected)


async def test_what_cannot_be_resized_says_so(path: Path, tmp_path: Path) -> None:
    with open_model(path) as model:
        async with executor_of(model, tmp_path, driver(), **SETTINGS) as executor:
            with pytest.raises(ConfigError, match="for good"):
                await executor.resize(None)
        settings = {**SETTINGS, "moe_expert_cache": 2}
        async with executor_of(model, tmp_path, driver(), **settings) as executor:
            with pytest.raises(ConfigError, match="more are needed"):
                await executor.resize(MARGIN_BYTES)
    async with open_engine(EngineConfig(device="fake")) as engine:
        with pytest.raises(ConfigError, match="no GPU"):
            await engine.resize(4.0)
