"""Graphs that are captured while nothing is asked for; a step loop that lets it happen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine import idle
from runtime.engine.idle import Idler
from runtime.engine.step import StepKind
from runtime.errors import OutOfDeviceMemory
from runtime.models import open_model
from runtime.notices import Reason
from tests.engine.test_gpu_executor import TOKENS, executor_of, logits_of, step_of
from tests.support.block_models import BLOCK_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Preparing:
    """A preparation of some pieces, and the executor that has it."""

    def __init__(self, n_pieces: int) -> None:
        self.n_left, self.n_done = n_pieces, 0
        self.begun, self.may_end, self.ended = (asyncio.Event() for _ in range(3))
        self.may_end.set()
        self.limits: Any = None

    @property
    def warm_up(self) -> Preparing:
        return self

    async def next(self) -> bool:
        self.begun.set()
        await self.may_end.wait()
        self.n_done += 1
        self.n_left -= 1
        if not self.n_left:
            self.ended.set()
        return self.n_left > 0

    async def run(self, step: Any) -> Any: ...
    def save_pages(self, pages: Any) -> Any: ...
    def load_pages(self, pages: Any, images: Any) -> None: ...
    def describe(self) -> dict[str, object]:
        return {}

    async def close(self) -> None: ...


async def test_pieces_are_done_while_nobody_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PAUSE_SECONDS", 0.0)
    executor, wake = Preparing(3), asyncio.Event()
    assert isinstance(executor, idle.PreparingExecutor)
    idler = Idler(executor)
    waiting = asyncio.create_task(idler.until(wake))
    await executor.ended.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert executor.n_done == 3 and not waiting.done(), "there is nothing left to prepare"
    wake.set()
    await waiting
    wake.clear()
    again = asyncio.create_task(idler.until(wake))
    await asyncio.sleep(0)
    wake.set()
    await again
    assert executor.n_done == 3


async def test_who_wakes_the_loop_waits_for_no_second_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, wake = Preparing(9), asyncio.Event()
    idler = Idler(executor)
    wake.set()
    await idler.until(wake)
    assert executor.n_done == 0, "it rests before it begins"
    monkeypatch.setattr(idle, "PAUSE_SECONDS", 0.0)
    executor.may_end.clear()
    wake.clear()
    waiting = asyncio.create_task(idler.until(wake))
    await executor.begun.wait()
    wake.set()
    await asyncio.sleep(0)
    assert not waiting.done(), "steps may not begin in the middle of a piece"
    executor.may_end.set()
    await waiting
    assert executor.n_done == 1


async def test_an_executor_that_prepares_nothing_is_left_alone() -> None:
    wake = asyncio.Event()
    waiting = asyncio.create_task(Idler(object()).until(wake))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    wake.set()
    await waiting


async def test_graphs_are_captured_ahead_and_serve(tmp_path: Path) -> None:
    with open_model(BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path / "model.gguf")) as model:
        settings: dict[str, Any] = {"max_step_tokens": 8}
        async with executor_of(model, tmp_path, **settings) as gpu:
            prompt = step_of(gpu, StepKind.PREFILL, [(0, TOKENS[:3], 0)], [2])
            cold = await logits_of(gpu, prompt)
        async with executor_of(model, tmp_path, **settings) as gpu:
            steps, likely = gpu._parts.steps, gpu._parts.shapes.likely()
            n = len(steps)
            while await gpu.warm_up.next():
                assert len(steps) == n + 1
                n = len(steps)
            assert all(steps.is_captured(shape) for shape in likely)
            n = len(steps)
            assert np.array_equal(await logits_of(gpu, prompt), cold)
            assert len(steps) == n and not await gpu.warm_up.next()


async def test_where_memory_is_short_nothing_more_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(BLOCK_MODELS["qwen3moe"]("Q8_0", 1).write(tmp_path / "model.gguf")) as model:
        async with executor_of(model, tmp_path, max_step_tokens=8) as gpu:
            tried = []

            def of(shape: object) -> object:
                tried.append(shape)
                raise OutOfDeviceMemory("graph constants", 1, 0)

            with monkeypatch.context() as short:
                short.setattr(gpu._parts.steps, "of", of)
                assert not await gpu.warm_up.next() and len(tried) == 1
            (notice,) = gpu._parts.planned.settings.notices.all
            assert notice.reason is Reason.SHRUNK and "when steps need them" in notice.text
            assert not await gpu.warm_up.next()
