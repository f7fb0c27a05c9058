"""Every architecture of the seed on the GPU executor: llama.cpp's logits, whatever a step mixes.

Sequences of different lengths in one step, one that was saved and went on elsewhere, one that began
as a copy of another: as the scheduler has it with preemption and shared prefixes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.engine.test_gpu_executor import assert_close, executor_of, logits_of
from tests.support.cpu_steps import step_of
from tests.support.golden import golden_case

NAMES = (
    "gpt_oss",
    "glm4moe",
    "mimo2",
    "deepseek2",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "glm5_next",
)
LONG, SHORT = 2, 1
"""Tokens of the prompts of sequences 0 and 1."""


@pytest.mark.parametrize("name", NAMES)
async def test_golden_logits(name: str, tmp_path: Path) -> None:
    case = golden_case(name, tmp_path)
    text = case.tokens
    texts = dict.fromkeys(range(4), text)
    with open_model(case.path) as model:
        async with executor_of(model, tmp_path, n_snapshots=2) as gpu:
            parts = [(0, text[:LONG], 0), (1, text[:SHORT], 0)]
            prompts = await logits_of(gpu, step_of(gpu, StepKind.PREFILL, parts, texts=texts))
            expected = np.concatenate([case.logits[:LONG], case.logits[:SHORT]])
            assert_close(prompts, expected)

            await preempt(gpu, 0, 2)
            lengths = {1: SHORT, 3: LONG}
            parts = [(s, text[n : n + 1], n) for s, n in lengths.items()]
            step = step_of(gpu, StepKind.DECODE, parts, texts=texts)
            has_states = step.state_slots is not None
            step = replace(step, page_copies=((2, 3),), state_copies=((2, 3),) * has_states)
            decoded = await logits_of(gpu, step)
            assert_close(decoded, case.logits[[SHORT, LONG]])
            facts, n_layers = gpu.describe(), len(model.spec.layers)
        assert facts["layers_computed"] == {"gpu": 2 * n_layers, "cpu": 0}


async def preempt(gpu: GPUExecutor, sequence: int, other: int) -> None:
    """Save a sequence of one page, spoil what it had, and bring it back as another."""
    has_states = gpu.limits.n_state_slots > 0
    pages = await asyncio.to_thread(gpu.save_pages, [sequence])
    await asyncio.to_thread(gpu.load_pages, [sequence], bytes(len(pages)))
    await asyncio.to_thread(gpu.load_pages, [other], pages)
    if has_states:
        state = await asyncio.to_thread(gpu.save_state, sequence)
        await asyncio.to_thread(gpu.load_state, sequence, bytes(len(state)))
        await asyncio.to_thread(gpu.load_state, other, state)
