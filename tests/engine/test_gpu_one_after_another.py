"""Executors one after the other in a process, on one GPU and on two: nothing of one survives it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import F32, StepKind
from runtime.models import open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.engine.test_gpu_hybrid_ahead import chosen_ahead
from tests.engine.test_gpu_two import gpus
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALL, SOME = 8, 2
"""Experts of a layer in a GPU's memory."""
N_STEPS = 2
CLOSING_NAME, CLOSING_SECONDS = "engine closing", 20.0


async def answers(executor: GPUExecutor) -> tuple[F32, list[int]]:
    """Logits of a short prompt; tokens of steps that run ahead."""
    prompt = step_of(executor, StepKind.PREFILL, [(1, TOKENS[:2], 0)])
    return await logits_of(executor, prompt), await chosen_ahead(executor, N_STEPS)


def threads() -> set[str]:
    """That stay: one that closes an engine, perhaps another test's, is waited for."""
    for thread in threading.enumerate():
        if thread.name == CLOSING_NAME:
            thread.join(CLOSING_SECONDS)
    return {thread.name for thread in threading.enumerate()}


async def test_the_last_executor_is_as_the_first(tmp_path: Path) -> None:
    """Resident and hybrid, split and whole, by turns."""
    fake, found = gpus(2), list[tuple[F32, list[int]]]()
    before, live = threads(), dict(fake.live)
    path = BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(tmp_path / "model.gguf")
    with open_model(path) as model:
        for split, slots in ((False, ALL), (True, ALL), (False, SOME), (True, SOME), (False, SOME)):
            settings: dict[str, Any] = {"split": split, "moe_expert_cache": slots}
            settings |= {"n_threads": 2, "exchange_rounds": 0}
            async with executor_of(model, tmp_path, fake, **settings) as executor:
                assert executor._epoch == 1
                made: Any = executor._parts.exchange
                assert (made is None) == (slots == ALL)
                if made is not None:
                    assert not made.memory.any()
                found.append(await answers(executor))
            assert fake.live == live
            assert threads() <= before | {"asyncio_0", "asyncio_1", "asyncio_2"}
    logits, tokens = found[0]
    for others, chosen in found[1:]:
        assert np.array_equal(others.view(np.uint32), logits.view(np.uint32))
        assert chosen == tokens
