"""The engine on the real CPU executor: preemption and poisoned weights, with real arithmetic."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import runtime
from ops.quants import FORMATS
from tests.support.fake_engine import GREEDY, ids, read
from tests.support.gguf_writer import Tensor
from tests.support.tiny_model import N_VOCAB
from tests.support.tiny_models import quantized_olmoe

pytestmark = pytest.mark.usefixtures("no_task_is_left")

POISONED = 5


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
async def test_preempted_sequences_answer_as_if_alone(cache_type: str) -> None:
    """Three sequences of up to 120 tokens share pages for 192; two of them must leave."""
    config = runtime.EngineConfig(
        n_ctx=192, n_threads=2, cache_type_k=cache_type, cache_type_v=cache_type, prefix_cache=False
    )
    params = GREEDY(max_tokens=100, ignore_eos=True)
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 12288, 20).tolist() for _ in range(3)]
    async with runtime.open_engine(config) as engine:
        together = await asyncio.gather(*(read(engine, prompt, params) for prompt in prompts))
        assert engine.statistics().counters.preemptions >= 2
        alone = [await read(engine, prompt, params) for prompt in prompts]
    assert len({tuple(ids(tokens)) for tokens in alone}) == 3  # so that a mix-up would show
    for beside, single in zip(together, alone, strict=True):
        assert len(beside) == 100
        assert ids(beside) == ids(single)


def model_with_a_poisoned_token(path: Path) -> Path:
    """A quantized model; the embedding row of the token POISONED has one NaN scale."""
    model = quantized_olmoe("Q8_0")
    fmt = FORMATS["Q8_0"]
    n_embd = 256
    random = np.random.default_rng(2)
    blocks = random.integers(0, 256, (N_VOCAB, n_embd // 32, fmt.block_bytes), np.uint8)
    scales = blocks.view(fmt.layout)[..., 0]["d"]
    scales[:] = 1 / 64
    scales[POISONED, 3] = np.nan
    table = Tensor("token_embd.weight", (n_embd, N_VOCAB), blocks.tobytes(), fmt.ggml_type)
    model.tensors = [table if t.name == table.name else t for t in model.tensors]
    return model.write(path)


async def test_a_nan_weight_fails_only_the_request_that_reads_it(tmp_path: Path) -> None:
    path = model_with_a_poisoned_token(tmp_path / "poisoned.gguf")
    # A greedy answer must not run into the token itself.
    params = GREEDY(max_tokens=10, logit_bias=[(POISONED, False)])
    good, bad = [1, 2, 3], [1, 2, POISONED, 3]
    async with runtime.open_engine(runtime.EngineConfig(model=path, n_ctx=128, n_threads=2)) as e:
        expected = ids(await read(e, good, params))
        answers = await asyncio.gather(
            read(e, good, params, reuse_prefix=False),
            read(e, bad, params),
            read(e, good, params),
            return_exceptions=True,
        )
        assert isinstance(answers[1], runtime.ComputeError)
        for answer in (answers[0], answers[2], await read(e, good, params)):
            assert not isinstance(answer, BaseException)
            assert ids(answer) == expected
        assert e.statistics().counters.requests_failed == 1
        with pytest.raises(runtime.ComputeError):  # nothing of it was kept as a prefix
            await read(e, bad, params)
