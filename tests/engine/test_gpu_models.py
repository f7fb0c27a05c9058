"""Every kind of attention model on the GPU executor: the CPU's logits and those of llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtime
from runtime.cuda.driver import initialized
from runtime.engine.step import StepKind
from runtime.errors import DeviceUnavailable
from runtime.models import open_model
from tests.engine.test_cpu_executor import executor_of as cpu_executor_of
from tests.engine.test_gpu_executor import (
    TOKENS,
    assert_close,
    executor_of,
    logits_of,
    step_of,
)
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.support.fake_driver import FakeDriver
from tests.support.fake_engine import GREEDY, ids, read
from tests.support.golden import golden_case
from tests.support.tiny_attention_models import deepseek2_lite, gpt_oss
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import with_blocks
from tests.support.tiny_recurrent_models import glm5_next

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

F16 = {"cache_type_k": "f16", "cache_type_v": "f16"}
LATENT = ("attn_q.weight", "attn_k_b.weight", "attn_v_b.weight", "attn_kv_a_mqa.weight")


@pytest.mark.parametrize("name", ["gpt_oss", "glm4moe", "mimo2", "deepseek2"])
async def test_golden_logits(name: str, tmp_path: Path) -> None:
    """A prompt, then a token; the windows of 6 and 7 keys are left behind."""
    case = golden_case(name, tmp_path)
    with open_model(case.path) as model:
        async with executor_of(model, tmp_path) as gpu:
            prompt = step_of(gpu, StepKind.PREFILL, [(1, case.tokens[:8], 0)])
            assert_close(await logits_of(gpu, prompt), case.logits[:8])
            token = step_of(gpu, StepKind.DECODE, [(1, case.tokens[8:9], 8)])
            assert_close(await logits_of(gpu, token), case.logits[8:9])


def block_gpt_oss() -> TinyModel:
    """Widths of 96, three blocks of 32 as 2880 are ninety; a window of more than a page."""
    model = gpt_oss(n_layers=1, window=34, n_embd=96, n_ff=96)
    return with_blocks(with_blocks(model, "MXFP4", "_exps.weight"), "Q8_0", "attn_output.weight")


def block_deepseek2() -> TinyModel:
    model = with_blocks(deepseek2_lite(n_layers=2, nope=32), "Q8_0", *LATENT)
    return with_blocks(model, "Q4_0", "_exps.weight")


@pytest.mark.parametrize(("made", "cache_type"), [(block_gpt_oss, "f32"), (block_deepseek2, "f16")])
async def test_blocks_in_any_batch_and_cut_have_the_cpus_logits(
    made: Callable[[], TinyModel], cache_type: str, tmp_path: Path
) -> None:
    n, settings = 37, {"cache_type_k": cache_type, "cache_type_v": cache_type}
    with open_model(made().write(tmp_path / "model.gguf")) as model:
        async with (
            executor_of(model, tmp_path, **settings) as gpu,
            cpu_executor_of(model, **settings) as cpu,
        ):
            step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:n], 0)], [0, 2, 33, 36])
            whole = await logits_of(gpu, step)
            assert_close(whole, await logits_of(cpu, step))
            # The end once more, beside the beginning of another sequence.
            ends = [(1, TOKENS[33:n], 33), (2, TOKENS[:3], 0)]
            step = step_of(gpu, StepKind.PREFILL, ends, [4, 6, 0, 3])
            assert np.array_equal(await logits_of(gpu, step), whole)
            await logits_of(cpu, step)
            pair = [(1, TOKENS[:1], n), (2, TOKENS[7:8], 3)]
            step = step_of(gpu, StepKind.DECODE, pair)
            decoded = await logits_of(gpu, step)
            assert_close(decoded, await logits_of(cpu, step))
            alone = step_of(gpu, StepKind.DECODE, pair[1:])
            assert np.array_equal(await logits_of(gpu, alone), decoded[1:])


async def test_missed_experts_with_biases_have_the_same_bits(tmp_path: Path) -> None:
    """Those that the CPU computes too: their biases and their activation."""
    with open_model(block_gpt_oss().write(tmp_path / "model.gguf")) as model:
        rows = []
        for slots in (8, 2):
            settings = {"moe_expert_cache": slots, "n_threads": 2, "exchange_rounds": 0}
            async with executor_of(model, tmp_path, hybrid_driver(), **settings) as gpu:
                step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:2], 0)])
                rows.append(await logits_of(gpu, step))
                facts = gpu.describe()
        assert np.array_equal(rows[0].view(np.uint32), rows[1].view(np.uint32))
        assert facts["expert_cpu_misses"]


def wide_latents() -> TinyModel:
    """The rows of 512 and 64 that the real models cache."""
    model = TinyModel("deepseek2", seed=7)
    model.base(64, 1, 2, n_head_kv=1, n_ff=64)
    model.set(attention__key_length=576, attention__value_length=512, rope__dimension_count=64)
    model.set(attention__kv_lora_rank=512, leading_dense_block_count=1)
    model.set(attention__key_length_mla=96, attention__value_length_mla=32)
    model.ends(64)
    model.norms(0, attn_norm=64, attn_kv_a_norm=512, ffn_norm=64)
    model.matrix("blk.0.attn_q.weight", 64, 2 * 96)
    model.matrix("blk.0.attn_kv_a_mqa.weight", 64, 576)
    model.matrix("blk.0.attn_k_b.weight", 32, 512, 2)
    model.matrix("blk.0.attn_v_b.weight", 512, 32, 2)
    model.matrix("blk.0.attn_output.weight", 64, 64)
    model.dense(0, 64, 64)
    return model


async def test_prompts_find_room_on_a_card_with_little_shared_memory(tmp_path: Path) -> None:
    """Where a block of many rows does not fit, a token's own blocks do."""
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 32 << 10
    case = golden_case("mimo2", tmp_path)
    with open_model(case.path) as model:
        async with executor_of(model, tmp_path, fake) as gpu:
            step = step_of(gpu, StepKind.PREFILL, [(1, case.tokens[:9], 0)])
            assert_close(await logits_of(gpu, step), case.logits[:9])


async def test_a_card_with_little_shared_memory_says_so(tmp_path: Path) -> None:
    """Turing has 64 KiB for a block."""
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 64 << 10
    with open_model(wide_latents().write(tmp_path / "model.gguf")) as model:
        with pytest.raises(DeviceUnavailable, match=r"attention takes 119 KiB of .*: device cpu"):
            async with executor_of(model, tmp_path, fake, **F16):
                pass
        assert fake.live == {}


@pytest.mark.parametrize(("types", "kib"), [(("f32", "f32"), 316), (("f32", "f16"), 252)])
async def test_wide_latents_in_f32_are_refused_by_name(
    types: tuple[str, str], kib: int, tmp_path: Path
) -> None:
    keys, values = types
    message = (
        f"attention takes {kib} KiB of shared memory for this model with cache_type_k {keys} and "
        f"cache_type_v {values}, Fake GPU 0 has 227 KiB for a block: f16 for these takes less, and "
        "device cpu takes any"
    )
    fake = FakeDriver(memory_bytes=1 << 30)
    with open_model(wide_latents().write(tmp_path / "model.gguf")) as model:
        with pytest.raises(DeviceUnavailable, match=message):
            async with executor_of(model, tmp_path, fake, cache_type_k=keys, cache_type_v=values):
                pass
        assert fake.live == {}


async def test_latents_in_q8_0_are_refused_with_what_may_fit(tmp_path: Path) -> None:
    """In f16 they have kernels of their own, which take less."""
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 99 << 10
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    with open_model(glm5_next(latent=512).write(tmp_path / "model.gguf")) as model:
        with pytest.raises(DeviceUnavailable, match="99 KiB for a block: f16 for these may take"):
            async with executor_of(model, tmp_path, fake, **types):
                pass
        assert fake.live == {}


async def test_latents_are_kept_once_as_keys_and_as_values(tmp_path: Path) -> None:
    """Room for a unit of rows, as on Ada, for some queries too, as on an A100, and for more."""
    rows, decoded = [], []
    with open_model(wide_latents().write(tmp_path / "model.gguf")) as model:
        for shared_bytes, capability in ((99 << 10, 8), (163 << 10, 8), (227 << 10, 9)):
            fake = FakeDriver(memory_bytes=1 << 30)
            fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = shared_bytes
            fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = capability
            async with (
                executor_of(model, tmp_path, fake, **F16) as gpu,
                cpu_executor_of(model, **F16) as cpu,
            ):
                step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:3], 0)])
                rows.append(await logits_of(gpu, step))
                assert_close(rows[-1], await logits_of(cpu, step))
                token = step_of(gpu, StepKind.DECODE, [(1, TOKENS[3:4], 3)])
                decoded.append(await logits_of(gpu, token))
                assert_close(decoded[-1], await logits_of(cpu, token))
                assert gpu.describe()["kv_page_bytes"] == 32 * 576 * 2
    assert np.array_equal(rows[1], rows[2])
    assert np.array_equal(decoded[1], decoded[2])


async def test_prompts_read_pairs_of_latents_in_q8_0(tmp_path: Path) -> None:
    """Two sequences, the second step behind pages of the first; no bit depends on the cut."""
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 227 << 10
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    with open_model(wide_latents().write(tmp_path / "model.gguf")) as model:
        async with (
            executor_of(model, tmp_path, fake, **types) as gpu,
            cpu_executor_of(model, **types) as cpu,
        ):
            rows = []
            for tokens in ([(1, 0, 5)], [(1, 5, 7), (2, 0, 2)], [(3, 0, 7)]):
                given = [(row, TOKENS[start:end], start) for row, start, end in tokens]
                step = step_of(gpu, StepKind.PREFILL, given)
                rows.append(await logits_of(gpu, step))
                assert_close(rows[-1], await logits_of(cpu, step))
    assert np.array_equal(np.concatenate([rows[0], rows[1][:2]]), rows[2])


@pytest.mark.parametrize("made", [wide_latents, lambda: gpt_oss(n_layers=2)])
async def test_preempted_and_prefixed_sequences_answer_as_if_alone(
    made: Callable[[], TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences that need two pages each share three; then one begins like another."""
    fake = initialized(FakeDriver(memory_bytes=1 << 30), "13.4.4")
    monkeypatch.setattr("runtime.cuda.driver.open_driver", lambda: fake)
    path = str(made().write(tmp_path / "model.gguf"))
    prompts = [TOKENS[:31].tolist(), TOKENS[5:36].tolist()]
    three, one = GREEDY(max_tokens=3, ignore_eos=True), GREEDY(max_tokens=1, ignore_eos=True)
    config = runtime.EngineConfig(device="cuda", model=path, n_ctx=96, n_threads=2)
    async with runtime.open_engine(config) as engine:
        together = await asyncio.gather(*(read(engine, prompt, three) for prompt in prompts))
        assert engine.statistics().counters.preemptions == 1
        answer = ids(together[1])
        further = await read(engine, [*prompts[1], *answer[:2]], one)
        alone = await read(engine, prompts[1], three, reuse_prefix=False)
    assert ids(alone) == answer != ids(together[0])
    assert further[0].n_cached == 32
    assert ids(further) == answer[2:]
