"""Logits and tokens are the same whatever serves the experts; all four ways do serve some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.config import BUNDLED_MODEL
from runtime.cuda.driver import open_driver
from runtime.errors import DeviceUnavailable
from runtime.models import open_model
from tests.engine.test_gpu_executor import executor_of
from tests.engine.test_gpu_hybrid import ALL, hybrid_driver
from tests.support.block_models import BLOCK_MODELS
from tests.support.cache_equality import (
    CHOSEN_AMONG,
    WAYS,
    Followed,
    differences,
    drawn,
    every_way,
    follow,
    on_this_machine,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_TOKENS = 5


async def test_every_way_serves_and_no_bit_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")  # so few tokens teach the default nothing
    monkeypatch.setenv("LLAMA_MOE_CACHE_ADMIT", "0")
    runs = []
    with open_model(BLOCK_MODELS["qwen3moe"]("Q4_K", 1).write(tmp_path / "model.gguf")) as model:
        for slots in (5, ALL):
            settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
            with every_way():
                async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
                    runs.append(await follow(executor, N_TOKENS, slots, 2))
        n_used = model.spec.layers[0].feed_forward.n_used
    assert differences(runs) == []
    assert sum(runs[0].uses.values()) == 2 * N_TOKENS * n_used


def test_a_difference_is_found() -> None:
    def run(slots: int) -> Followed:
        digests, tokens = {"greedy": "a", "seeded": "b"}, {"greedy": [1], "seeded": [2]}
        return Followed(slots, digests, tokens, dict.fromkeys(WAYS, 5))

    first, last = run(2), run(8)
    assert differences([first, last]) == []
    first.logits["seeded"] = "c"
    first.uses["uploaded"] = last.uses["uploaded"] = 1
    wrong = differences([first, last])
    assert wrong[0] == "2 slots: other logits (seeded)"
    assert wrong[1] == "only 6.2% by uploaded"


async def test_on_a_real_gpu() -> None:
    """The bundled model; shares are what `python -m tests.support.cache_equality` judges."""
    try:
        open_driver()
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    with open_model(BUNDLED_MODEL) as model:
        n_expert = model.spec.n_expert_max
    wrong = differences(await on_this_machine(BUNDLED_MODEL, 100, n_expert))
    assert [what for what in wrong if not what.startswith("only")] == []


def test_tokens_are_drawn_among_the_best() -> None:
    logits = np.arange(100, dtype=np.float32) / 50
    rng = np.random.default_rng(1)
    tokens = {drawn(logits, rng) for _ in range(200)}
    assert min(tokens) >= 100 - CHOSEN_AMONG and len(tokens) > 10
