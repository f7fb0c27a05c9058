"""What happens to a running engine when its model file changes on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runtime
from runtime.config import BUNDLED_MODEL

GREEDY = runtime.SamplingParams(temperature=0.0, max_tokens=8)


async def answer(engine: runtime.Engine) -> list[int | None]:
    return [token.id async for token in engine.generate("A river is", GREEDY)]


async def test_a_replaced_file_serves_on(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(BUNDLED_MODEL, path)
    async with runtime.open_engine(runtime.EngineConfig(model=path, n_threads=1)) as engine:
        before = await answer(engine)
        (tmp_path / "new.gguf").write_bytes(b"something else")
        (tmp_path / "new.gguf").rename(path)
        assert await answer(engine) == before


async def test_a_truncated_file_is_a_typed_error_before_the_step(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(BUNDLED_MODEL, path)
    async with runtime.open_engine(runtime.EngineConfig(model=path, n_threads=1)) as engine:
        os.truncate(path, 1 << 20)
        with pytest.raises(runtime.CorruptModel, match=r"model\.gguf.*while it was open"):
            await answer(engine)
        os.truncate(path, BUNDLED_MODEL.stat().st_size)  # its pages are zero now, but it is mapped


READ_TRUNCATED = """
import asyncio, os, sys, runtime
async def main(path):
    config = runtime.EngineConfig(model=path, n_threads=1, name_bus_errors=True)
    async with runtime.open_engine(config) as engine:
        engine._check_model = lambda: os.truncate(path, 1 << 20)  # between the check and the step
        async for token in engine.generate("A river is"):
            pass
asyncio.run(main(sys.argv[1]))
"""


def test_a_file_truncated_under_a_step_ends_the_process_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(BUNDLED_MODEL, path)
    ended = subprocess.run(
        [sys.executable, "-c", READ_TRUNCATED, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 74, ended.stderr
    assert ended.stderr.count("\n") == 1 and str(path) in ended.stderr
