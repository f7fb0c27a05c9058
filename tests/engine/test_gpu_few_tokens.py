"""The kernels of single tokens have the bits of those that several share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.synthetic import write_model
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.bench.test_shapes import small
from tests.engine.test_gpu_executor import executor_of, logits_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEQUENCES = (0, 1, 2, 3)
N_PROMPT = 2
ALONE = (0, 3)
"""Sequences whose token is computed alone as well."""
TEXTS = np.random.default_rng(8).integers(0, 512, (len(SEQUENCES), N_PROMPT + 1)).astype(np.int32)


async def test_a_token_alone_has_the_bits_of_one_among_four(tmp_path: Path) -> None:
    """KDA with gates by way of two matrices, latent heads, streams, a shared expert, as blocks."""
    shape = replace(small("glm-5.3-flash"), kda_dim=128, n_head=2, n_expert=4, n_used=2, top_k=512)
    write_model(tmp_path / "model.gguf", shape, 4, skew=0.5)
    alone = []
    with open_model(tmp_path / "model.gguf") as model:
        model.spec = replace(model.spec, layers=model.spec.layers[2:])
        async with executor_of(model, tmp_path) as gpu:
            await _read_prompts(gpu)
            for s in ALONE:
                step = step_of(gpu, StepKind.DECODE, [_token(s)])
                alone.append(await logits_of(gpu, step))
            entries = _entries(gpu, step)
            assert {"mix_streams", "delta_gates_q8_0", "dense_down_q4_k"} <= entries
        async with executor_of(model, tmp_path) as gpu:
            await _read_prompts(gpu)
            step = step_of(gpu, StepKind.DECODE, [_token(s) for s in SEQUENCES])
            together = await logits_of(gpu, step)
            assert "delta_gates_q8_0" not in _entries(gpu, step)
    assert np.array_equal(np.concatenate(alone), together[list(ALONE)])


async def _read_prompts(gpu: Any) -> None:
    parts = [(s, TEXTS[s, :N_PROMPT], 0) for s in SEQUENCES]
    await gpu.run(step_of(gpu, StepKind.PREFILL, parts, [0]))


def _token(s: int) -> tuple[int, Any, int]:
    return s, TEXTS[s, N_PROMPT:], N_PROMPT


def _entries(gpu: Any, step: Any) -> set[str]:
    parts = gpu._parts
    return {p.kernel.entry for p, _ in parts.steps.launches(parts.shapes.of(step))}
