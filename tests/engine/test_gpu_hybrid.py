"""Experts on the GPU, on the CPU, read in place, swapped: the same bits of every logit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import F32, StepKind
from runtime.errors import ExchangeStalled
from runtime.experts import cache_settings, exchange, fetched_experts
from runtime.models import Model, open_model
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver
from tests.support.tiny_attention_models import gpt_oss
from tests.support.tiny_models import with_blocks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_PROMPT, N_DECODED = 3, 4
ALL = 8
"""Experts of a layer."""


def hybrid_driver() -> FakeDriver:
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.host = lambda: time.sleep(0)
    return fake


async def greedy(model: Model, tmp_path: Path, slots: int) -> tuple[F32, dict[str, Any]]:
    """Logits of a prompt's last token and of greedily chosen ones; what the executor says."""
    settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
    async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
        step = step_of(executor, StepKind.PREFILL, [(1, TOKENS[:N_PROMPT], 0)])
        rows = [(await logits_of(executor, step))[-1]]
        for position in range(N_PROMPT, N_PROMPT + N_DECODED):
            token = np.array([rows[-1].argmax()], np.int32)
            step = step_of(executor, StepKind.DECODE, [(1, token, position)])
            rows.append((await logits_of(executor, step))[-1])
        return np.array(rows), executor.describe()


@pytest.mark.parametrize(
    ("name", "fmt", "n_layers", "caches"),
    [
        ("qwen3moe", "Q4_K", 2, [(0, 0.0, 0), (ALL // 4, 0.5, 0), (ALL // 2, 0.0, 0)]),
        ("qwen2moe", "Q8_0", 1, [(ALL // 2, 0.7, 0)]),
        ("qwen3moe", "Q4_K", 1, [(ALL // 2, 0.0, 2)]),
    ],
)
async def test_the_cache_changes_no_bit(
    name: str,
    fmt: str,
    n_layers: int,
    caches: list[tuple[int, float, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """caches: slots a layer, the share of the others that is read in place, and which of a token's
    misses besides."""
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")  # so few tokens teach the default nothing
    monkeypatch.setenv("LLAMA_MOE_CACHE_ADMIT", "0")
    served = {"hits": 0, "cpu_misses": 0, "in_place_reads": 0}
    with open_model(BLOCK_MODELS[name](fmt, n_layers).write(tmp_path / "model.gguf")) as model:
        expected, facts = await greedy(model, tmp_path, ALL)
        assert facts["experts"] == "all on the GPU"
        for slots, zero_copy, every in caches:
            settings = partial(
                cache_settings.CacheSettings, zero_copy=zero_copy, in_place_every=every
            )
            with monkeypatch.context() as patch:
                patch.setattr(cache_settings, "CacheSettings", settings)
                logits, facts = await greedy(model, tmp_path, slots)
            assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32)), slots
            for kind in served:
                served[kind] += facts[f"expert_{kind}"]
            assert (facts["expert_uploads"] > 0) == (slots > 0)
    total = sum(served.values())
    assert all(count >= 0.1 * total for count in served.values()), served


async def test_a_batch_misses_as_each_of_its_tokens_does(tmp_path: Path) -> None:
    model_file = BLOCK_MODELS["qwen3moe"]("Q4_K", 1).write(tmp_path / "model.gguf")
    with open_model(model_file) as model:
        alone, together = [], []
        for slots in (ALL, 2):
            settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
            async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
                parts = [(s, TOKENS[s : s + 3], 0) for s in range(2)]
                step = step_of(executor, StepKind.PREFILL, parts)
                together.append(await logits_of(executor, step))
                rows = [step_of(executor, StepKind.PREFILL, [part]) for part in parts]
                alone.append(np.concatenate([await logits_of(executor, step) for step in rows]))
    for logits in (*alone, *together):
        assert np.array_equal(logits.view(np.uint32), alone[0].view(np.uint32))


async def test_experts_grouped_for_tensor_cores_may_be_missed_too(tmp_path: Path) -> None:
    model_file = BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path / "model.gguf")
    with open_model(model_file) as model:
        results = []
        for slots in (ALL, 3):
            settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
            async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
                step = step_of(executor, StepKind.PREFILL, [(0, TOKENS[:17], 0)])
                results.append(await logits_of(executor, step))
        assert np.array_equal(results[0].view(np.uint32), results[1].view(np.uint32))


@pytest.mark.parametrize(("n_layers", "pieces"), [(5, 1), (2, 3)])
async def test_prompts_fetch_what_is_not_on_the_gpu(
    n_layers: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer is used anew; neither the CPU nor a resident copy changes a bit."""
    monkeypatch.setattr(fetched_experts, "FETCHED_TOKENS", 16)
    monkeypatch.setattr(fetched_experts, "LEAST_PIECE_BYTES", 0)
    monkeypatch.setattr(fetched_experts, "PIECES", pieces)
    model_file = BLOCK_MODELS["qwen3moe"]("Q4_K", n_layers).write(tmp_path / "model.gguf")
    settings = {"n_threads": 2, "exchange_rounds": 0}
    with open_model(model_file) as model:
        results = []
        for held in (ALL, 3):
            settings["moe_expert_cache"] = held
            async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
                prompt = step_of(executor, StepKind.PREFILL, [(0, TOKENS[:11], 0)])
                token = step_of(executor, StepKind.DECODE, [(0, TOKENS[11:12], 11)])
                results += [await logits_of(executor, step) for step in (prompt, token)]
                facts = executor.describe()
                fetches = executor._parts.experts.fetches
        assert fetches is not None and len(fetches.pieces) > fetched_experts.BUFFERS
        assert facts["expert_fetched"] > 0
        assert facts["expert_cpu_misses"] <= n_layers * 3, "only the decoded token's are left"
        assert facts["expert_hits"] > 0
        for resident, fetched in zip(results[:2], results[2:], strict=True):
            assert np.array_equal(resident.view(np.uint32), fetched.view(np.uint32))


async def test_pieces_of_fetched_experts_have_their_own_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_experts, "FETCHED_TOKENS", 16)
    monkeypatch.setattr(fetched_experts, "LEAST_PIECE_BYTES", 0)
    tiny = with_blocks(gpt_oss(n_layers=1, n_embd=64, n_ff=64), "MXFP4", "_exps.weight")
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        results = []
        for held in (ALL, 2):
            settings = {"moe_expert_cache": held, "n_threads": 2, "exchange_rounds": 0}
            async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
                step = step_of(executor, StepKind.PREFILL, [(0, TOKENS[:9], 0)])
                results.append(await logits_of(executor, step))
                facts = executor.describe()
    assert facts["expert_fetched"] > 0 and facts["expert_cpu_misses"] == 0
    assert np.array_equal(results[0].view(np.uint32), results[1].view(np.uint32))


async def test_the_exchange_is_tested_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_file = BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path / "model.gguf")
    settings = {"moe_expert_cache": 2, "n_threads": 2, "exchange_rounds": 1}
    with open_model(model_file) as model, caplog.at_level("INFO", "runtime.engine.gpu"):
        async with executor_of(model, tmp_path, hybrid_driver(), **settings):
            assert "exchange with the CPU: 50 rounds" in caplog.text


async def test_workers_that_stall_lose_a_step_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_file = BLOCK_MODELS["qwen3moe"]("Q4_K", 1).write(tmp_path / "model.gguf")
    sizes = partial(exchange.ExchangeSizes, patience_ns=20_000)
    monkeypatch.setattr(exchange, "ExchangeSizes", sizes)
    with open_model(model_file) as model:
        settings = {"moe_expert_cache": 0, "n_threads": 2, "exchange_rounds": 0}
        async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
            step = step_of(executor, StepKind.PREFILL, [(0, TOKENS[:3], 0)])
            expected = await logits_of(executor, step)
            with no_team(executor), pytest.raises(ExchangeStalled, match="layer 0"):
                await asyncio.wait_for(executor.run(step), 30)
            assert np.array_equal(await logits_of(executor, step), expected)


@contextmanager
def no_team(executor: GPUExecutor) -> Iterator[None]:
    """Inside, the workers get no program."""
    made = executor._parts.exchange
    assert made is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "begin", lambda epoch, *, behind: None)
        yield
