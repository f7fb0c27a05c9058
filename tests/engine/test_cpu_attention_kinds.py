"""Windows, sinks, latent attention and biased experts on the CPU executor and in the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import runtime
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.support.cpu_steps import executor_of, logits_in_chunks, step_of
from tests.support.fake_engine import GREEDY, ids, read
from tests.support.golden import golden_case
from tests.support.reference_model import reference_logits
from tests.support.tiny_attention_models import deepseek2_lite, glm4moe, gpt_oss, mimo2
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS, with_blocks

pytestmark = pytest.mark.usefixtures("no_task_is_left")

NAMES = ["gpt_oss", "glm4moe", "mimo2", "deepseek2"]
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
async def test_sequences_of_different_lengths_in_one_step(name: str, tmp_path: Path) -> None:
    """Prompts, then decoding, of three sequences together: each has its own golden logits."""
    case = golden_case(name, tmp_path)
    lengths = (17, 40, 3)
    with open_model(case.path) as model:
        async with executor_of(model) as executor:
            parts = [(s, case.tokens[:n], 0) for s, n in enumerate(lengths)]
            logits = (await executor.run(step_of(executor, StepKind.PREFILL, parts))).logits
            expected = np.concatenate([case.logits[:n] for n in lengths])
            assert np.abs(logits - expected).max() < TOLERANCE
            for i in range(50):
                now = [(s, case.tokens[n + i : n + i + 1], n + i) for s, n in enumerate(lengths)]
                logits = (await executor.run(step_of(executor, StepKind.DECODE, now))).logits
                expected = case.logits[[n + i for n in lengths]]
                assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
async def test_bits_do_not_depend_on_the_cut_nor_on_the_outputs(name: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path)
    settings = {"cache_type_k": "f16", "cache_type_v": "f16"}
    with open_model(case.path) as model:
        async with executor_of(model, **settings) as executor:
            whole = await logits_in_chunks(executor, case.tokens, 120)
            for size in (7, 64):
                cut = await logits_in_chunks(executor, case.tokens, size)
                assert np.array_equal(cut, whole), size
            decoded = await logits_in_chunks(executor, case.tokens, 1, StepKind.DECODE)
            assert np.array_equal(decoded, whole)
            for outputs in ([119], [70, 3, 31], []):
                step = step_of(executor, StepKind.PREFILL, [(2, case.tokens, 0)], outputs)
                assert np.array_equal((await executor.run(step)).logits, whole[outputs])
        async with executor_of(model, n_threads=1, **settings) as executor:
            assert np.array_equal(await logits_in_chunks(executor, case.tokens, 120), whole)


@pytest.mark.parametrize("name", NAMES)
async def test_pages_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path)
    with open_model(case.path) as model:
        async with executor_of(model) as executor:
            await logits_in_chunks(executor, case.tokens[:64], 64)
            image = executor.save_pages([1, 5])
            await logits_in_chunks(executor, case.tokens[::-1][:70], 70)
            executor.load_pages([2, 6], image)
            step = step_of(executor, StepKind.DECODE, [(2, case.tokens[64:65], 64)])
            logits = (await executor.run(step)).logits
            assert np.abs(logits - case.logits[64]).max() < TOLERANCE


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek2"])
async def test_long_contexts_decode_as_they_prefill(name: str, tmp_path: Path) -> None:
    """Decode splits contexts of more than 512 keys."""
    tokens = np.random.default_rng(4).integers(0, 96, 600).astype(np.int32)
    path = TINY_MODELS[name]().write(tmp_path / "model.gguf")
    with open_model(path) as model:
        async with executor_of(model, n_ctx=4 * 640, max_step_tokens=600) as executor:
            step = step_of(executor, StepKind.PREFILL, [(0, tokens, 0)], [505, 599])
            expected = (await executor.run(step)).logits.copy()
            for row, position in enumerate((505, 599)):
                part = [(0, tokens[position : position + 1], position)]
                again = await executor.run(step_of(executor, StepKind.DECODE, part))
                assert np.array_equal(again.logits[0], expected[row])


EXPERTS = ("_exps.weight",)
ATTENTION = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
LATENT = ("attn_q.weight", "attn_k_b.weight", "attn_v_b.weight", "attn_kv_a_mqa.weight")
QUANTIZED = {
    "gpt-oss": lambda: with_blocks(
        with_blocks(gpt_oss(), "MXFP4", *EXPERTS), "Q8_0", *ATTENTION, "output.weight"
    ),
    "glm4moe": lambda: with_blocks(glm4moe(), "Q5_0", *EXPERTS, *ATTENTION),
    "mimo2": lambda: with_blocks(mimo2(), "IQ4_NL", *EXPERTS, "attn_qkv.weight"),
    "deepseek2": lambda: with_blocks(
        with_blocks(deepseek2_lite(2, nope=32), "Q8_0", *LATENT), "Q4_0", *EXPERTS
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("cache_type", ["f32", "f16"])
async def test_quantized_weights_agree_with_plain_floats(
    name: str, cache_type: str, tmp_path: Path
) -> None:
    made: TinyModel = QUANTIZED[name]()
    tokens = np.random.default_rng(3).integers(0, 96, 40).astype(np.int32)
    with open_model(made.write(tmp_path / "model.gguf")) as model:
        expected = reference_logits(model, tokens)
        settings = {"cache_type_k": cache_type, "cache_type_v": cache_type}
        async with executor_of(model, **settings) as executor:
            logits = await logits_in_chunks(executor, tokens, 40)
    # Of each position: where an expert is chosen otherwise, all of a position is another.
    errors = ((logits - expected) ** 2).mean(1) / expected.var(1)
    assert np.median(errors) < 5e-4, errors


@pytest.mark.parametrize("name", NAMES)
async def test_preempted_and_prefixed_sequences_answer_as_if_alone(
    name: str, tmp_path: Path
) -> None:
    """Three sequences of up to 120 tokens share pages for 192; then one begins like another."""
    path = str(TINY_MODELS[name]().write(tmp_path / "model.gguf"))
    params = GREEDY(max_tokens=80, ignore_eos=True)
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 96, 40).tolist() for _ in range(3)]
    config = runtime.EngineConfig(device="cpu", model=path, n_ctx=192, n_threads=2)
    async with runtime.open_engine(config) as engine:
        together = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
        assert engine.statistics().counters.preemptions >= 1
        alone = [await read(engine, prompt, params) for prompt in prompts]
        for beside, single in zip(together, alone, strict=True):
            assert ids(beside) == ids(single)
        again = await read(engine, prompts[2], params)
    assert again[0].n_cached >= 32
    assert ids(again) == ids(alone[2])
