"""An engine serves before its experts are pinned, and without: the same bits, other ways."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu import expert_opening
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import F32, StepKind
from runtime.experts import fetched_experts, host_experts, page_reader, pinning
from runtime.experts.host_memory import HostMemory
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.machine_files import machine_files

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SETTINGS: dict[str, Any] = {"n_threads": 2, "exchange_rounds": 0, "moe_expert_cache": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path_factory.mktemp("m") / "model.gguf")


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_experts, "FETCHED_TOKENS", 8)
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(pinning, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(expert_opening, "PIN_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("LLAMA_MOE_CACHE_PROFILE", "0")


@contextmanager
def held_after(fake: FakeDriver, most: int) -> Iterator[threading.Event]:
    """Registering experts stops after so many bytes until the event is set."""
    go, seen, register = threading.Event(), 0, fake._cuMemHostRegister

    def watched(address: int, n_bytes: int, flags: int) -> None:
        nonlocal seen
        pins = threading.current_thread().name == "pinning experts"
        seen += n_bytes if pins else 0
        if pins and seen > most and not go.is_set():
            fake._lock.release()  # the real driver lets others in
            go.wait()
            fake._lock.acquire()
        register(address, n_bytes, flags)

    fake._cuMemHostRegister = watched  # type: ignore[assignment, method-assign]
    try:
        yield go
    finally:
        go.set()


def most_of(model: Model) -> int:
    """More bytes than the first experts have, fewer than all."""
    names = [name for name in model.weights if "exps" in name]
    return int(0.6 * sum(model.weights[name].n_bytes for name in names))


async def prompt(executor: GPUExecutor) -> F32:
    parts = [(0, TOKENS[:9], 0)]
    return await logits_of(executor, step_of(executor, StepKind.PREFILL, parts))


def facts_of(executor: GPUExecutor) -> dict[str, Any]:
    return executor.describe()


def same(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


async def test_a_prompt_before_the_experts_are_pinned_is_the_cpu_s(
    path: Path, tmp_path: Path
) -> None:
    fake = hybrid_driver()
    with open_model(path) as model, held_after(fake, most_of(model)) as go:
        async with executor_of(model, tmp_path, fake, **SETTINGS) as executor:
            early = await prompt(executor)
            facts = facts_of(executor)
            assert facts["expert_fetched"] == 0 and facts["expert_cpu_misses"] > 0
            assert "so far" in str(facts["expert_pinned"])
            go.set()
            store: Any = executor._parts.experts
            assert store._host._host._pinning.wait(10.0)
            late = await prompt(executor)
            facts = facts_of(executor)
            assert facts["expert_fetched"] > 0 and "so far" not in str(facts["expert_pinned"])
    assert same(early, late)


async def test_closing_does_not_wait_for_the_rest(path: Path, tmp_path: Path) -> None:
    fake = hybrid_driver()
    with open_model(path) as model, held_after(fake, most_of(model)) as go:
        async with executor_of(model, tmp_path, fake, **SETTINGS):
            go.set()


@pytest.mark.parametrize("short", [False, True], ids=["mmap", "memory is short"])
async def test_without_pinned_experts_prompts_are_the_cpu_s_and_swaps_go_on(
    path: Path, tmp_path: Path, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is larger than the memory runs from its map, the most used experts pinned."""
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")
    monkeypatch.setenv("LLAMA_MOE_CACHE_ADMIT", "0")
    if short:
        with open_model(path) as model:
            n_bytes = model.file.n_bytes // 2
        files = machine_files(tmp_path, total=n_bytes, available=n_bytes)
        for module in (host_experts, page_reader):
            monkeypatch.setattr(module, "HostMemory", lambda: HostMemory(files))
    mode = {} if short else {"load_mode": "mmap"}
    with open_model(path) as model:
        async with executor_of(model, tmp_path, hybrid_driver(), **SETTINGS, **mode) as executor:
            results = [await prompt(executor)]
            store: Any = executor._parts.experts
            for position in range(9, 11):
                parts = [(0, TOKENS[position : position + 1], position)]
                await logits_of(executor, step_of(executor, StepKind.DECODE, parts))
                staging = store._uploader._staging
                while len(staging._read) < len(store._uploader._staged):
                    pass
            results.append(await prompt(executor))
            facts = facts_of(executor)
            assert facts["expert_fetched"] == 0 and facts["expert_uploads"] > 0
            threads = [thread.name for thread in threading.enumerate()]
            assert ("expert pages" in threads) == short
            assert (0 < store._host.pinned_experts.sum() < 8) == short
            assert ("fit the free memory" in str(facts["expert_pinned"])) == short
    assert same(*results)
