"""The first experts on the GPU are the profile's; what the steps use goes into it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles import load_profile
from runtime.cuda.driver import initialized
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.gpu.opening import open_gpu_executor
from runtime.engine.gpu.settings import GPUSettings
from runtime.engine.step import StepKind
from runtime.errors import ConfigError
from runtime.experts import usage
from runtime.experts.cached_experts import CachedExperts
from runtime.models import Model, open_model
from runtime.progress import Progress
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETTINGS: dict[str, Any] = {"moe_expert_cache": 2, "n_threads": 2, "exchange_rounds": 0}
KNOWN = {(0, 5): 90, (1, 7): 80, (1, 3): 70, (0, 6): 60}
"""The most used experts, none of them the first of a layer."""
N_USED = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(tmp_path_factory.mktemp("m") / "model.gguf")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model's profile is to be; there is none yet."""
    chosen = tmp_path / "kept" / "usage"
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", str(chosen))
    return chosen


def know(model: Model) -> int:
    """Write a profile; the uses in it."""
    found = usage.lifetime_usage(model)
    counts = np.ones(found.known.shape, np.int64)
    for expert, n in KNOWN.items():
        counts[expert] = n
    found.save(counts, 100, now=0.0)
    return int(counts.sum())


def residents(store: object) -> set[tuple[int, int]]:
    assert isinstance(store, CachedExperts)
    return {(int(layer), int(expert)) for layer, expert in np.argwhere(store.cache.resident)}


async def prompt(executor: GPUExecutor, n_tokens: int) -> None:
    await logits_of(executor, step_of(executor, StepKind.PREFILL, [(0, TOKENS[:n_tokens], 0)]))


async def test_the_profile_s_experts_are_there_first_and_closing_saves(
    path: Path, profile: Path, tmp_path: Path
) -> None:
    with open_model(path) as model:
        before = know(model)
        async with executor_of(model, tmp_path, hybrid_driver(), **SETTINGS) as executor:
            assert residents(executor._parts.experts) == set(KNOWN)
            await prompt(executor, 3)
        saved = load_profile(profile)
    assert saved.n_tokens == 103
    assert int(saved.counts.sum()) == before + 3 * 2 * N_USED


async def test_a_killed_run_leaves_what_was_saved_on_the_way(
    path: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "SAVE_SECONDS", 0.0)
    with open_model(path) as model:
        async with executor_of(model, tmp_path, hybrid_driver(), **SETTINGS) as executor:
            await prompt(executor, 3)
            await prompt(executor, 1)  # while it runs the policy hears of the first
            for thread in threading.enumerate():
                if thread.name == "expert usage":
                    thread.join()
            saved = load_profile(profile)
            assert saved.n_tokens == 3 and int(saved.counts.sum()) == 3 * 2 * N_USED
            kept = {file.name for file in profile.parent.iterdir()}
            assert kept == {profile.name, f".{profile.name}.lock"}


async def test_each_gpu_begins_with_its_own_layers(
    path: Path, profile: Path, tmp_path: Path
) -> None:
    fake = hybrid_driver()
    fake.n_devices = 2
    with open_model(path) as model:
        before = know(model)
        async with executor_of(model, tmp_path, fake, **SETTINGS) as executor:
            experts: Any = executor._parts.experts
            assert [residents(store) for store in experts.stores] == [
                {(0, 5), (0, 6)},
                {(0, 7), (0, 3)},
            ]
            await prompt(executor, 2)
        saved = load_profile(profile)
    assert saved.n_tokens == 102
    assert int(saved.counts.sum()) == before + 2 * 2 * N_USED


def test_a_variable_that_names_no_policy_stops_the_start(
    path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "best")
    fake = hybrid_driver()
    settings = GPUSettings(n_ctx=256, max_sequences=1, max_step_tokens=8, **SETTINGS)
    with open_model(path) as model, pytest.raises(ConfigError, match="LLAMA_MOE_CACHE_POLICY"):
        open_gpu_executor(model, settings, Progress(), driver=initialized(fake, "13.4.4"))
    assert fake.live == {}
    assert not profile.exists()
