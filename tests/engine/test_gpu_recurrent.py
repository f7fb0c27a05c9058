"""Recurrent models on the GPU executor over the interpreter: the CPU's logits, moving states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ops.gpu.delta_net import CHUNK
from runtime.engine.gpu.control import spans_of
from runtime.engine.gpu.step_shape import part_of
from runtime.engine.ngram_rows import contexts_of
from runtime.engine.step import Step, StepKind
from runtime.errors import ConfigError, EngineBug
from runtime.models import open_model
from tests.engine.test_cpu_executor import executor_of as cpu_executor_of
from tests.engine.test_gpu_executor import assert_close, executor_of, logits_of
from tests.support.cpu_steps import step_of
from tests.support.fake_driver import FakeDriver
from tests.support.golden import golden_case
from tests.support.quantized import q8_0
from tests.support.tiny_model import TinyModel
from tests.support.tiny_recurrent_models import glm5_next, qwen4exp, qwen35

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOKENS = np.random.default_rng(8).integers(0, 96, 24).astype(np.int32)


async def test_quantized_models_have_the_cpus_logits(tmp_path: Path) -> None:
    with open_model(q8_0(qwen35()).write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path) as gpu, cpu_executor_of(model) as cpu:
            for start, end in ((0, 2), (2, 3)):
                kind = StepKind.PREFILL if start == 0 else StepKind.DECODE
                step = step_of(gpu, kind, [(1, TOKENS[start:end], start)])
                assert_close(await logits_of(gpu, step), await logits_of(cpu, step))


@pytest.mark.parametrize("tiny", [qwen35, glm5_next])
async def test_chunks_that_do_not_fit_a_block_are_read_token_by_token(
    tiny: Callable[[], TinyModel], tmp_path: Path
) -> None:
    """Ada and consumer Blackwell: the CPU's logits, and bits do not depend on cuts at all."""
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 99 << 10
    with open_model(tiny().write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, fake) as gpu, cpu_executor_of(model) as cpu:
            step = step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:3], 0)])
            whole = await logits_of(gpu, step)
            assert_close(whole, await logits_of(cpu, step))
            cut = [
                await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(2, TOKENS[a:b], a)]))
                for a, b in ((0, 1), (1, 3))
            ]
            assert np.array_equal(np.concatenate(cut), whole)


async def test_bits_depend_on_the_text_alone_and_states_move(tmp_path: Path) -> None:
    """Cuts, batches, sequences in any slot; copies of states, saved and loaded ones.

    A prompt that is cut between chunks has the bits of one that is not; else they are close.
    """
    with open_model(q8_0(qwen35()).write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, n_snapshots=2) as gpu:
            assert gpu.limits.n_state_slots == 6
            end = CHUNK + 2
            whole = await logits_of(gpu, step_of(gpu, StepKind.PREFILL, [(1, TOKENS[:19], 0)]))
            first = step_of(gpu, StepKind.PREFILL, [(2, TOKENS[:1], 0), (3, TOKENS[:CHUNK], 0)])
            assert np.array_equal(await logits_of(gpu, first), whole[[0, *range(CHUNK)]])
            parts = [(3, TOKENS[CHUNK:end], CHUNK), (2, TOKENS[1:3], 1)]
            second = await logits_of(gpu, step_of(gpu, StepKind.PREFILL, parts))
            assert np.array_equal(second[:2], whole[CHUNK:end])
            assert_close(second[2:], whole[1:3])

            # One token of each: sequence 2 in slot 4 with a copy of its state, 3 where it is.
            positions = {3: end, 2: 3}
            parts = [(s, TOKENS[at : at + 1], at) for s, at in positions.items()]
            third = step_of(gpu, StepKind.DECODE, parts)
            moved = replace(
                third, state_slots=np.array([3, 4], np.int32), state_copies=((2, 5), (5, 4))
            )
            image = await asyncio.to_thread(gpu.save_state, 3)
            pair = await logits_of(gpu, moved)
            assert_close(pair, whole[[end, 3]])
            for sequence, row in ((3, 0), (2, 1)):
                if sequence == 3:
                    await asyncio.to_thread(gpu.load_state, 0, image)
                at = positions[sequence]
                part = step_of(gpu, StepKind.DECODE, [(sequence, TOKENS[at : at + 1], at)])
                part = replace(part, state_slots=np.array([0 if sequence == 3 else 5], np.int32))
                assert np.array_equal((await logits_of(gpu, part))[0], pair[row])

            facts = gpu.describe()
            assert facts["state_bytes"] == 6 * len(image)
            with pytest.raises(ValueError, match="is not a state"):
                await asyncio.to_thread(gpu.load_state, 0, image[1:])
            with pytest.raises(EngineBug, match="state slots"):
                await gpu.run(replace(third, state_slots=np.array([3, 6], np.int32)))


@pytest.mark.parametrize(
    ("make", "kept"),
    [(qwen4exp, (1, 3)), (glm5_next, (0, 1))],
)
async def test_several_streams_have_the_cpus_logits(
    make: Callable[[], TinyModel], kept: tuple[int, ...], tmp_path: Path
) -> None:
    """Some layers of models with gated and with mixed streams, n-gram rows, KDA.

    Two sequences, prompts that are cut, then a token of each.
    """
    tiny = make()
    # Every expert and block is used, or small errors choose others.
    tiny.set(expert_used_count=8, attention__indexer__top_k=512)
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        layers = tuple(model.spec.layers[i] for i in kept)
        model.spec = replace(model.spec, layers=layers)
        texts = {1: TOKENS, 2: TOKENS[::-1]}
        async with executor_of(model, tmp_path) as gpu, cpu_executor_of(model) as cpu:
            for kind, spans in (
                (StepKind.PREFILL, [(2, 0, 2), (1, 0, 6)]),
                (StepKind.DECODE, [(1, 6, 7), (2, 2, 3)]),
            ):
                parts = [(s, texts[s][start:end], start) for s, start, end in spans]
                outputs = [3, 0, 7] if kind is StepKind.PREFILL else None
                step = step_of(gpu, kind, parts, outputs, texts=texts)
                assert_close(await logits_of(gpu, step), await logits_of(cpu, step))


@pytest.mark.parametrize(("make", "kept"), [(qwen4exp, (3,)), (glm5_next, (4, 5))])
async def test_chosen_keys_are_the_cpus(
    make: Callable[[], TinyModel], kept: tuple[int, ...], tmp_path: Path
) -> None:
    """A token reads a block of four keys and those after the last: blocks over two steps, a
    layer that reads as the one before it, pages that moved.
    """
    tiny = make()
    # Every expert, or small errors choose others; one block of four keys.
    tiny.set(expert_used_count=8, attention__indexer__top_k=4)
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        layers = tuple(model.spec.layers[i] for i in kept)
        model.spec = replace(model.spec, layers=layers)
        async with executor_of(model, tmp_path) as gpu, cpu_executor_of(model) as cpu:
            for start, end in ((0, 6), (6, 10), (10, 11)):
                kind = StepKind.PREFILL if end - start > 1 else StepKind.DECODE
                step = step_of(gpu, kind, [(1, TOKENS[start:end], start)])
                expected = await logits_of(cpu, step)
                assert_close(await logits_of(gpu, step), expected)
            again = [(3, TOKENS[10:11], 10)]
            moved = step_of(gpu, StepKind.DECODE, again)
            # The last step made no block complete: the state is still that before it.
            moved = replace(moved, page_copies=((1, 3),), state_copies=((1, 3),))
            assert_close(await logits_of(gpu, moved), expected)


@pytest.mark.parametrize(("n_head", "cache_type"), [(4, "f16"), (40, "f16"), (40, "q8_0")])
async def test_rows_of_latents_are_read_by_lists(
    n_head: int, cache_type: str, tmp_path: Path
) -> None:
    """Prompts read masks where several tokens share a block, lists where they do not."""
    tiny = glm5_next(latent=512, n_head=n_head)
    types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    tiny.set(expert_used_count=8, attention__indexer__top_k=4)
    fake = FakeDriver(memory_bytes=1 << 30)
    fake.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 227 << 10
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 9
    with open_model(tiny.write(tmp_path / "model.gguf")) as model:
        model.spec = replace(model.spec, layers=model.spec.layers[4:6])
        async with (
            executor_of(model, tmp_path, fake, **types) as gpu,
            cpu_executor_of(model, **types) as cpu,
        ):
            for start, end in ((0, 10), (10, 11)):
                kind = StepKind.PREFILL if start == 0 else StepKind.DECODE
                step = step_of(gpu, kind, [(1, TOKENS[start:end], start)])
                assert_close(await logits_of(gpu, step), await logits_of(cpu, step))


async def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = golden_case("qwen35", tmp_path).path
    with open_model(path) as model, pytest.raises(ConfigError, match="recurrent states"):
        async with executor_of(model, tmp_path, n_snapshots=1 << 20):
            pass


async def test_logits_that_are_not_finite_name_their_output(tmp_path: Path) -> None:
    """States have moved on: the step is not repeated for each sequence alone."""
    tiny = qwen35()
    index = next(i for i, t in enumerate(tiny.tensors) if t.name == "token_embd.weight")
    values = np.frombuffer(tiny.tensors[index].data, np.float32).copy()
    values[5 * 64] = np.nan
    tiny.tensors[index] = replace(tiny.tensors[index], data=values.tobytes())
    with open_model(tiny.write(tmp_path / "nan.gguf")) as model:
        async with executor_of(model, tmp_path) as gpu:
            parts = [(1, np.array([1, 2], np.int32), 0), (2, np.array([5, 6], np.int32), 0)]
            result = await gpu.run(step_of(gpu, StepKind.PREFILL, parts))
            assert result.not_finite == (2, 3)
            assert np.isfinite(result.logits[:2]).all()


def test_spans_say_where_each_sequence_lies() -> None:
    step = Step(
        StepKind.PREFILL,
        token_ids=np.arange(6, dtype=np.int32),
        positions=np.array([4, 5, 6, 0, 1, 9], np.int32),
        rows=np.array([2, 2, 2, 0, 0, 3], np.int32),
        page_tables=np.zeros((4, 1), np.int32),
        output_tokens=np.array([5], np.int32),
        state_slots=np.array([7, 8, 9, 6], np.int32),
    )
    expected = [[3, 2, 0, 7], [0, 0, 0, 8], [0, 3, 4, 9], [5, 1, 9, 6]]
    assert spans_of(step).tolist() == expected


def test_a_part_of_a_step_knows_the_tokens_before_it() -> None:
    """Sequence 0 goes on in the middle, sequence 1 begins: both as the whole step says."""
    step = Step(
        StepKind.PREFILL,
        token_ids=np.array([10, 11, 12, 20, 21], np.int32),
        positions=np.array([5, 6, 7, 0, 1], np.int32),
        rows=np.array([0, 0, 0, 1, 1], np.int32),
        page_tables=np.zeros((2, 1), np.int32),
        output_tokens=np.array([4, 2], np.int32),
        state_slots=np.array([3, 1], np.int32),
        previous_tokens=np.array([[9, 8], [-1, -1]], np.int32),
    )
    part, rows = part_of(step, slice(1, 5))
    assert part.previous_tokens is not None and rows == [0, 1]
    assert part.previous_tokens.tolist() == [[10, 9], [-1, -1]]
    assert np.array_equal(contexts_of(part, 3), contexts_of(step, 3)[1:])
    assert spans_of(part).tolist() == [[0, 2, 6, 3], [2, 2, 0, 1]]
