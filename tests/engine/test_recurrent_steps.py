"""Recurrent and sparse models on the CPU executor: bits depend on a sequence's tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.engine.step import StepKind
from runtime.errors import EngineBug
from runtime.models import open_model
from runtime.models.delta_net import DeltaNetSpec
from runtime.models.latent_attention import LatentAttentionSpec
from runtime.models.spec import LayerSpec
from tests.support.cpu_steps import executor_of, logits_in_chunks, step_of
from tests.support.golden import golden_case
from tests.support.quantized import q8_0
from tests.support.reference_model import reference_logits
from tests.support.tiny_model import TinyModel
from tests.support.tiny_models import TINY_MODELS
from tests.support.tiny_recurrent_models import glm5_next, qwen4exp, qwen35

NAMES = ("qwen35", "qwen35moe", "qwen4exp", "glm5_next")
TOKENS = np.random.default_rng(3).integers(0, 96, 100).astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
async def test_bits_do_not_depend_on_the_cut_or_the_threads(name: str, tmp_path: Path) -> None:
    results = []
    with open_model(golden_case(name, tmp_path).path) as model:
        for n_threads, size in ((2, 100), (1, 64), (2, 7)):
            async with executor_of(model, n_threads=n_threads) as executor:
                results.append(await logits_in_chunks(executor, TOKENS, size))
        async with executor_of(model) as executor:
            results.append(await logits_in_chunks(executor, TOKENS, 1, StepKind.DECODE))
    for other in results[1:]:
        assert np.array_equal(other, results[0])


@pytest.mark.parametrize("name", NAMES)
async def test_sequences_of_different_lengths_share_steps(name: str, tmp_path: Path) -> None:
    """Prompts together, then continuous batching: one more token of each, one of them late."""
    texts = {0: TOKENS[:47], 2: TOKENS[20:59], 3: TOKENS[59:100]}
    with open_model(golden_case(name, tmp_path).path) as model:
        async with executor_of(model) as executor:
            alone = {s: await logits_in_chunks(executor, text, 100) for s, text in texts.items()}
            parts = [(s, text[: 30 - 9 * s], 0) for s, text in texts.items()]
            step = step_of(executor, StepKind.PREFILL, parts, texts=texts)
            expected = np.concatenate([alone[s][: len(part)] for s, part, _ in parts])
            assert np.array_equal((await executor.run(step)).logits, expected)
            at = {s: len(part) for s, part, _ in parts}
            for i in range(9):
                taking_part = [s for s in texts if s != 2 or i > 3]
                parts = [(s, texts[s][at[s] : at[s] + 1], at[s]) for s in taking_part]
                step = step_of(executor, StepKind.DECODE, parts, texts=texts)
                logits = (await executor.run(step)).logits
                for row, s in enumerate(taking_part):
                    assert np.array_equal(logits[row], alone[s][at[s]]), (i, s)
                    at[s] += 1


@pytest.mark.parametrize("name", NAMES)
async def test_bits_do_not_depend_on_the_outputs_asked_for(name: str, tmp_path: Path) -> None:
    with open_model(golden_case(name, tmp_path).path) as model:
        async with executor_of(model) as executor:
            whole = await logits_in_chunks(executor, TOKENS, 100)
            for outputs in ([99], [70, 3, 31], []):
                step = step_of(executor, StepKind.PREFILL, [(2, TOKENS, 0)], outputs)
                assert np.array_equal((await executor.run(step)).logits, whole[outputs]), outputs
            last = [(2, TOKENS[-1:], 99)]
            if not outputs:  # the state is that after the last token: it has to be read again
                step = step_of(executor, StepKind.PREFILL, [(2, TOKENS[:99], 0)], [])
                await executor.run(step)
            step = step_of(executor, StepKind.DECODE, last, texts={2: TOKENS})
            assert np.array_equal((await executor.run(step)).logits, whole[-1:])


@pytest.mark.parametrize("name", NAMES)
async def test_states_and_pages_move(name: str, tmp_path: Path) -> None:
    """A state and its pages are copied, saved and loaded: the next token is the same elsewhere."""
    with open_model(golden_case(name, tmp_path).path) as model:
        async with executor_of(model) as executor:
            whole = await logits_in_chunks(executor, TOKENS, 100)
            await logits_in_chunks(executor, TOKENS[:64], 64)  # into sequence 1
            pages, state = executor.save_pages([1, 5]), executor.save_state(1)
            await logits_in_chunks(executor, TOKENS[::-1][:70], 70)
            executor.load_pages([2, 6], pages)
            executor.load_state(2, state)
            executor.load_state(5, state)
            for sequence in (2, 3):
                part = (sequence, TOKENS[64:65], 64)
                step = step_of(executor, StepKind.DECODE, [part], texts={sequence: TOKENS})
                if sequence == 3:
                    step = replace(step, page_copies=((2, 3), (6, 7)), state_copies=((5, 3),))
                assert np.array_equal((await executor.run(step)).logits, whole[64:65])
            with pytest.raises(ValueError, match="is not a state"):
                executor.load_state(2, state[:-1])


@pytest.mark.parametrize("name", ["qwen4exp", "glm5_next"])
async def test_blocks_of_which_nothing_is_read(name: str, tmp_path: Path) -> None:
    """A token reads 8 of up to 700 keys: whole blocks of attention have none of them."""
    tokens = np.random.default_rng(5).integers(0, 96, 700).astype(np.int32)
    with open_model(golden_case(name, tmp_path).path) as model:
        expected = reference_logits(model, tokens)
        async with executor_of(model, n_ctx=4 * 704, max_step_tokens=256) as executor:
            logits = await logits_in_chunks(executor, tokens, 256)
            assert np.abs(logits - expected).max() < 1e-3
            decoded = await logits_in_chunks(executor, tokens[:690], 230)
            assert np.array_equal(decoded, logits[:690])
            for at in range(690, 700):
                part = [(1, tokens[at : at + 1], at)]
                step = step_of(executor, StepKind.DECODE, part, texts={1: tokens})
                assert np.array_equal((await executor.run(step)).logits[0], logits[at]), at


@pytest.mark.parametrize("name", ["qwen4exp", "glm5_next"])
async def test_up_to_its_limit_a_choice_of_blocks_is_dense(name: str, tmp_path: Path) -> None:
    """With room for every block the bits are those of attention without an indexer."""
    with open_model(golden_case(name, tmp_path).path) as model:
        async with executor_of(model) as executor:
            sparse = await logits_in_chunks(executor, TOKENS, 100)
        for indexer in ({"n_best": 25}, None):
            layers = [without_choice(layer, indexer) for layer in model.spec.layers]
            dense = replace(model.spec, layers=tuple(layers))
            model.spec = dense
            async with executor_of(model) as executor:
                logits = await logits_in_chunks(executor, TOKENS, 100)
            assert not np.array_equal(logits, sparse)
            assert np.array_equal(logits[:11], sparse[:11]), "two blocks and three tokens"
            if indexer is not None:
                all_blocks = logits
    assert np.array_equal(logits, all_blocks)


def without_choice(layer: LayerSpec, changes: dict[str, int] | None) -> LayerSpec:
    """`layer` with a changed indexer, or none."""
    mixer = layer.mixer
    if isinstance(mixer, DeltaNetSpec):
        return layer
    if isinstance(mixer, LatentAttentionSpec) and changes is None:
        mixer = replace(mixer, reads_as_before=False)
    if mixer.indexer is None:
        return replace(layer, mixer=mixer)
    indexer = None if changes is None else replace(mixer.indexer, **changes)
    return replace(layer, mixer=replace(mixer, indexer=indexer))


@pytest.mark.parametrize(
    ("make", "matrix"),
    [
        (qwen35, "blk.0.attn_gate.weight"),
        (partial(qwen4exp, n_low=32), "blk.0.hc_attn_up.weight"),
        (partial(glm5_next, kda_dim=32), "blk.0.ssm_f_b.weight"),
    ],
)
async def test_quantized_matrices_agree_with_plain_floats(
    make: Callable[[], TinyModel], matrix: str, tmp_path: Path
) -> None:
    tiny = q8_0(make())
    if f"{tiny.architecture}.expert_count" in tiny.metadata:
        # Every expert and every block is used, or small errors would choose others.
        tiny.set(expert_used_count=8, attention__indexer__top_k=400)
    path = tiny.write(tmp_path / "model.gguf")
    tokens: NDArray[np.int32] = TOKENS[:40]
    with open_model(path) as model:
        assert model.weights[matrix].format.name == "Q8_0"
        expected = reference_logits(model, tokens)
        async with executor_of(model) as executor:
            logits = await logits_in_chunks(executor, tokens, 40)
            assert np.array_equal(await logits_in_chunks(executor, tokens, 9), logits)
    error = ((logits - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum()
    assert error < 5e-3, error


async def test_a_state_slot_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with open_model(golden_case("qwen35", tmp_path).path) as model:
        async with executor_of(model, n_snapshots=1) as executor:
            assert executor.limits.n_state_slots == 5
            step = step_of(executor, StepKind.PREFILL, [(2, TOKENS[:3], 0)])
            wrong = replace(step, state_slots=np.array([5], np.int32))
            with pytest.raises(EngineBug, match="state slots"):
                await executor.run(wrong)


async def test_logits_that_are_not_finite_name_their_output(tmp_path: Path) -> None:
    tiny = TINY_MODELS["qwen35"]()
    index = next(i for i, t in enumerate(tiny.tensors) if t.name == "token_embd.weight")
    values = np.frombuffer(tiny.tensors[index].data, np.float32).copy()
    values[5 * 64] = np.nan
    tiny.tensors[index] = replace(tiny.tensors[index], data=values.tobytes())
    with open_model(tiny.write(tmp_path / "nan.gguf")) as model:
        async with executor_of(model) as executor:
            good = [(1, np.array([1, 2, 3], np.int32), 0)]
            expected = (await executor.run(step_of(executor, StepKind.PREFILL, good))).logits.copy()
            bad = [*good, (2, np.array([4, 5, 6], np.int32), 0)]
            result = await executor.run(step_of(executor, StepKind.PREFILL, bad))
            assert result.not_finite == (4, 5)
            assert np.array_equal(result.logits[:3], expected)
            # The slot of the lost sequence begins anew.
            again = [(2, good[0][1], 0)]
            step = step_of(executor, StepKind.PREFILL, again)
            assert np.array_equal((await executor.run(step)).logits, expected)
