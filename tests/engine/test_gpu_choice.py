"""Norm, router and choice in one launch: the bits of three, and when there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.synthetic import write_model
from runtime.engine.gpu import feed_forward_launches
from runtime.engine.gpu.choice_launches import chooses_with_norm
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.step import StepKind
from runtime.models import open_model
from runtime.models.model import Model
from tests.bench.test_shapes import small
from tests.engine.test_gpu_executor import executor_of, logits_of
from tests.support.cpu_steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N_LAYERS = 3
"""x is in another place behind each of them, so that it has been in both."""


async def decoded(model: Model, folder: Path) -> tuple[list[bytes], set[str]]:
    """Logits of a prompt of two tokens and one more of it, as bytes; the kernels of a step."""
    text = np.array([5, 9, 7], np.int32)
    async with executor_of(model, folder) as executor:
        steps = [
            step_of(executor, StepKind.PREFILL, [(0, text[:2], 0)], texts={0: text}),
            step_of(executor, StepKind.DECODE, [(0, text[2:], 2)], texts={0: text}),
        ]
        logits = [(await logits_of(executor, step)).tobytes() for step in steps]
        shape = executor._parts.shapes.of(steps[-1])
        launches = executor._parts.steps.launches(shape)
    return logits, {planned.kernel.entry for planned, _ in launches}


async def test_one_launch_has_the_bits_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model.gguf", small("olmoe"), N_LAYERS, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        logits, entries = await decoded(model, tmp_path)
        assert "choose_experts_f32" in entries and "route" not in entries
        monkeypatch.setattr(feed_forward_launches, "chooses_with_norm", lambda *_: False)
        expected, entries = await decoded(model, tmp_path)
        assert "choose_experts_f32" not in entries and "route" in entries
    assert logits == expected


async def test_one_launch_is_for_few_tokens_of_large_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlanParts] = []

    def remembers(parts: PlanParts, block: object) -> bool:
        seen.append(parts)
        return False

    monkeypatch.setattr(feed_forward_launches, "chooses_with_norm", remembers)
    write_model(tmp_path / "model.gguf", small("olmoe"), 1, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        async with executor_of(model, tmp_path):
            parts = seen[0]
        (layer,) = model.spec.layers

        def chooses(n_tokens: int, n_multiprocessors: int = 132, shared: int = 100 << 10) -> bool:
            gpu = replace(parts.gpu, n_multiprocessors=n_multiprocessors, block_shared_bytes=shared)
            shape = replace(parts.shape, n_tokens=n_tokens)
            return chooses_with_norm(replace(parts, gpu=gpu, shape=shape), layer.feed_forward)

        assert chooses(1) and chooses(8)
        assert not chooses(16)
        assert not chooses(1, n_multiprocessors=8)  # those that wait could take all of them
        assert not chooses(1, shared=16 << 10)
