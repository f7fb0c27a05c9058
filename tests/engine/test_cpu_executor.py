"""The CPU executor: golden logits, bits that depend on the tokens alone, pages, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.cpu import cores
from ops.cpu.team import acquire_team
from runtime.config import BUNDLED_MODEL, EngineConfig
from runtime.engine import embedding
from runtime.engine.cpu_executor import open_cpu_executor
from runtime.engine.engine import Engine
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.engine.step import StepKind
from runtime.errors import (
    ComputeError,
    ConfigError,
    EngineBug,
    EngineClosed,
    UnsupportedArchitecture,
)
from runtime.models import Model, open_model
from runtime.models.spec import AttentionSpec
from tests.support.cpu_steps import executor_of, logits_in_chunks, step_of
from tests.support.golden import NAMES, golden_case
from tests.support.reference_model import reference_logits
from tests.support.tiny_models import TINY_MODELS, fused, quantized_olmoe

TOLERANCE = 1e-4
F32 = NDArray[np.float32]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["batch", "split", "fused"])
async def test_golden_logits(name: str, form: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path, fused(TINY_MODELS[name]()) if form == "fused" else None)
    with open_model(case.path) as model:
        async with executor_of(model) as executor:
            kind, size = (StepKind.DECODE, 1) if form == "split" else (StepKind.PREFILL, 120)
            logits = await logits_in_chunks(executor, case.tokens, size, kind)
    assert np.abs(logits - case.logits).max() < TOLERANCE


@pytest.fixture(scope="module")
def bundled() -> Iterator[Model]:
    with open_model(BUNDLED_MODEL) as model:
        yield model


@pytest.fixture(scope="module")
def text_tokens() -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 12288, 100).astype(np.int32)


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
async def test_bits_do_not_depend_on_the_cut_of_the_prompt(
    bundled: Model, text_tokens: NDArray[np.int32], cache_type: str
) -> None:
    settings = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    async with executor_of(bundled, **settings) as executor:
        whole = await logits_in_chunks(executor, text_tokens, 100)
        for size in (1, 7, 64):
            assert np.array_equal(await logits_in_chunks(executor, text_tokens, size), whole), size
        decoded = await logits_in_chunks(executor, text_tokens, 1, StepKind.DECODE)
        assert np.array_equal(decoded, whole)


async def test_bits_do_not_depend_on_other_sequences(
    bundled: Model, text_tokens: NDArray[np.int32]
) -> None:
    first, second, third = text_tokens[:40], text_tokens[40:75], text_tokens[75:]
    async with executor_of(bundled, cache_type_k="f16") as executor:
        alone = [await logits_in_chunks(executor, part, 64) for part in (first, second, third)]
        parts = [(0, first, 0), (2, second, 0), (3, third, 0)]
        together = await executor.run(step_of(executor, StepKind.PREFILL, parts))
        assert np.array_equal(together.logits, np.concatenate(alone))
        # Decode the last token of each again, together.
        last = [(0, first[-1:], 39), (2, second[-1:], 34), (3, third[-1:], 24)]
        decoded = await executor.run(step_of(executor, StepKind.DECODE, last))
        assert np.array_equal(decoded.logits, np.stack([rows[-1] for rows in alone]))


async def test_bits_do_not_depend_on_the_outputs_asked_for(
    bundled: Model, text_tokens: NDArray[np.int32]
) -> None:
    """The last layer computes the rows of outputs only."""
    async with executor_of(bundled, cache_type_v="f16") as executor:
        whole = await logits_in_chunks(executor, text_tokens, 100)
        for outputs in ([99], [70, 3, 31], [], [40]):
            parts = [(2, text_tokens, 0)]
            step = step_of(executor, StepKind.PREFILL, parts, outputs)
            logits = (await executor.run(step)).logits
            assert np.array_equal(logits, whole[outputs]), outputs
        decoded = step_of(executor, StepKind.DECODE, [(2, text_tokens[-1:], 99)])
        assert np.array_equal((await executor.run(decoded)).logits, whole[-1:])


async def test_bits_do_not_depend_on_the_threads(
    bundled: Model, text_tokens: NDArray[np.int32]
) -> None:
    results = []
    for n_threads in (1, 2, 3):
        async with executor_of(bundled, n_threads=n_threads) as executor:
            results.append(await logits_in_chunks(executor, text_tokens, 64))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


async def test_long_contexts_decode_as_they_prefill(bundled: Model) -> None:
    """Decode splits contexts of more than 512 keys."""
    tokens = np.random.default_rng(4).integers(0, 12288, 600).astype(np.int32)
    async with executor_of(bundled, n_ctx=4 * 640, max_step_tokens=600) as executor:
        whole = await executor.run(
            step_of(executor, StepKind.PREFILL, [(0, tokens, 0)], [505, 599])
        )
        expected = whole.logits.copy()
        for row, position in enumerate((505, 599)):
            part = [(0, tokens[position : position + 1], position)]
            again = await executor.run(step_of(executor, StepKind.DECODE, part))
            assert np.array_equal(again.logits[0], expected[row])


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "IQ3_XXS", "MXFP4"])
async def test_other_formats_agree_with_plain_floats(name: str, tmp_path: Path) -> None:
    path = quantized_olmoe(name).write(tmp_path / "model.gguf")
    tokens = np.arange(20, dtype=np.int32)
    with open_model(path) as model:
        expected = reference_logits(model, tokens)
        async with executor_of(model) as executor:
            logits = await logits_in_chunks(executor, tokens, 20)
    error = ((logits - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum()
    assert error < 5e-2, error


async def test_pages_are_saved_copied_and_loaded(
    bundled: Model, text_tokens: NDArray[np.int32]
) -> None:
    async with executor_of(bundled, cache_type_k="q8_0", cache_type_v="f16") as executor:
        await logits_in_chunks(executor, text_tokens[:64], 64)
        next_token = [(1, text_tokens[64:65], 64)]
        expected = (
            await executor.run(step_of(executor, StepKind.DECODE, next_token))
        ).logits.copy()
        image = executor.save_pages([1, 5])
        await logits_in_chunks(executor, text_tokens[::-1][:70], 70)
        executor.load_pages([2, 6], image)
        elsewhere = step_of(executor, StepKind.DECODE, [(2, text_tokens[64:65], 64)])
        assert np.array_equal((await executor.run(elsewhere)).logits, expected)
        moved = step_of(executor, StepKind.DECODE, [(3, text_tokens[64:65], 64)])
        moved = replace(moved, page_copies=((2, 3), (6, 7)))
        assert np.array_equal((await executor.run(moved)).logits, expected)
        with pytest.raises(ValueError, match="is not 1 pages"):
            executor.load_pages([2], image)


async def test_a_cancelled_step_ends_before_the_next_begins(
    bundled: Model, text_tokens: NDArray[np.int32]
) -> None:
    async with executor_of(bundled) as executor:
        expected = await logits_in_chunks(executor, text_tokens, 100)
        step = step_of(executor, StepKind.PREFILL, [(1, text_tokens, 0)])
        cancelled = asyncio.create_task(executor.run(step))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert np.array_equal((await executor.run(step)).logits, expected)
        # Closing waits too.
        left = asyncio.create_task(executor.run(step))
        await asyncio.sleep(0)
        left.cancel()
        await executor.close()
        with pytest.raises(EngineClosed):
            await executor.run(step)


async def test_numbers_that_are_not_finite_are_an_error_and_the_executor_lives(
    tmp_path: Path,
) -> None:
    tiny = TINY_MODELS["olmoe"]()
    index = next(i for i, t in enumerate(tiny.tensors) if t.name == "token_embd.weight")
    values = np.frombuffer(tiny.tensors[index].data, np.float32).copy()
    values[5 * 64] = np.nan
    tiny.tensors[index] = replace(tiny.tensors[index], data=values.tobytes())
    with open_model(tiny.write(tmp_path / "nan.gguf")) as model:
        async with executor_of(model) as executor:
            good = np.array([1, 2, 3], np.int32)
            expected = await logits_in_chunks(executor, good, 3)
            with pytest.raises(ComputeError, match=r"outputs \[1, 2\]"):
                await logits_in_chunks(executor, np.array([4, 5, 6], np.int32), 3)
            assert np.array_equal(await logits_in_chunks(executor, good, 3), expected)


async def test_the_loop_stays_responsive(bundled: Model) -> None:
    tokens = np.random.default_rng(5).integers(0, 12288, 500).astype(np.int32)
    async with executor_of(bundled, n_ctx=4 * 512, max_step_tokens=500) as executor:
        step = step_of(executor, StepKind.PREFILL, [(0, tokens, 0)], [499])
        await executor.run(step)
        stalls = [await _stalls_during(executor.run(step)) for _ in range(8)]
    assert all(len(turns) > 50 for turns in stalls)
    assert np.median(np.concatenate(stalls)) < 1e-3
    # The longest of a step: other processes may disturb a step, what the loop does disturbs all.
    assert min(max(turns) for turns in stalls) < 0.05


async def _stalls_during(work: Coroutine[Any, Any, Any]) -> list[float]:
    """Seconds of each turn of the loop until `work` is done."""
    running, turns = asyncio.create_task(work), []
    while not running.done():
        started = time.perf_counter()
        await asyncio.sleep(0)
        turns.append(time.perf_counter() - started)
    return turns


async def test_an_engine_of_default_settings_shares_a_smaller_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "default_threads", lambda: 2)
    small = EngineConfig(device="cpu", n_threads=1, n_ctx=256)
    default = EngineConfig(device="cpu", n_ctx=256)
    async with open_engine(small) as first, open_engine(default) as second:
        assert first.describe()["threads"] == second.describe()["threads"] == 1
        alone = await _greedy_tokens(first)
        assert len(alone) == 8
        assert await _greedy_tokens(second) == alone
        both = await asyncio.gather(_greedy_tokens(first), _greedy_tokens(second))
    assert both == [alone, alone]


async def _greedy_tokens(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [token.id async for token in engine.generate([5, 100, 2000, 7], params)]


async def test_what_cannot_work_is_refused(bundled: Model, tmp_path: Path) -> None:
    with open_model(golden_case("olmoe", tmp_path).path) as model:
        with pytest.raises(ConfigError, match="q8_0"):
            open_cpu_executor(
                model, n_ctx=64, max_sequences=1, max_step_tokens=8, cache_type_k="q8_0"
            )
        async with executor_of(model, max_step_tokens=4) as executor:
            tokens = np.arange(5, dtype=np.int32)
            with pytest.raises(EngineBug, match="5 tokens"):
                await executor.run(step_of(executor, StepKind.PREFILL, [(0, tokens, 0)]))
            with pytest.raises(ConfigError, match="2 workers"):
                open_cpu_executor(model, n_ctx=64, max_sequences=1, max_step_tokens=8, n_threads=3)
            for page in (0, 1):
                step = step_of(executor, StepKind.DECODE, [(0, tokens[:1], 40)])
                step.page_tables[0, page] = -1
                with pytest.raises(EngineBug, match="no page"):
                    await executor.run(step)


async def test_a_mixer_without_jobs_is_refused(tmp_path: Path) -> None:
    class OtherSpec(AttentionSpec):
        pass

    with open_model(golden_case("olmoe", tmp_path).path) as model:
        first, *others = model.spec.layers
        fields = {f.name: getattr(first.mixer, f.name) for f in dataclass_fields(first.mixer)}
        changed = replace(first, mixer=OtherSpec(**fields))
        model.spec = replace(model.spec, layers=(changed, *others))
        with pytest.raises(UnsupportedArchitecture, match="layer 0"):
            open_cpu_executor(model, n_ctx=64, max_sequences=1, max_step_tokens=8)
        with acquire_team(1) as team:
            assert team.n_threads == 1, "the refused executor kept the team"


async def test_small_and_large_embedding_tables_give_the_same_bits(
    bundled: Model, text_tokens: NDArray[np.int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = bundled.weights[bundled.spec.token_embedding]
    monkeypatch.setattr(embedding, "TURN_VALUES", 3 * 256)
    logits = []
    for limit in (embedding.KEPT_BYTES, 0):
        monkeypatch.setattr(embedding, "KEPT_BYTES", limit)
        rows = embedding.EmbeddingRows(weight)
        assert (rows.table is None) == (limit == 0)
        out = np.zeros((7, 256), np.float32)
        await rows.copy_to(out, text_tokens[:7])
        assert np.array_equal(out, weight.format.dequantize_rows(weight.data[text_tokens[:7]]))
        async with executor_of(bundled) as executor:
            logits.append(await logits_in_chunks(executor, text_tokens, 50))
    assert np.array_equal(logits[0], logits[1])


async def test_progress_and_description(bundled: Model) -> None:
    seen: list[tuple[int, int]] = []
    async with executor_of(bundled, progress=lambda done, n: seen.append((done, n))) as executor:
        facts = executor.describe()
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == len(seen) - 1
    assert facts["threads"] == 2
    assert facts["kv_bytes"] == 512 * 8 * 2 * 256 * 4
