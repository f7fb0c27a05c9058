"""An n-gram table is read row by row: an engine brings no more of it into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import runtime
from runtime.engine import ngram_rows
from runtime.engine.ngram_rows import NgramRows
from runtime.models import open_model
from runtime.models.ngram_memory import FEW_TOKENS
from tests.engine.test_ngram_rows import step_of
from tests.support.fake_engine import GREEDY, ids, read
from tests.support.gguf_writer import ARRAY, UINT64, Typed, f32_tensor
from tests.support.tiny_recurrent_models import qwen4exp

TABLE = "per_layer_token_embd.weight"
HEADS, ROWS, WIDTH = 4, 1 << 18, 16
LARGE = 4 * HEADS * ROWS * WIDTH
"""Bytes of the table."""


def with_large_table(path: Path) -> Path:
    """The tiny model with a table of 64 MiB and every other tensor as it was."""
    model = qwen4exp()
    at, table = next((i, t) for i, t in enumerate(model.tensors) if t.name == TABLE)
    rows = np.arange(HEADS * ROWS, dtype=np.float32)[:, None] % 7 + np.zeros(WIDTH, np.float32)
    assert rows.nbytes == LARGE and table.shape[0] == WIDTH
    model.tensors[at] = f32_tensor(TABLE, rows)
    sizes = [Typed(UINT64, ROWS - 2 * i - 1) for i in range(HEADS)]
    offsets = [Typed(UINT64, ROWS * i) for i in range(HEADS)]
    model.set(ple__head_vocab_sizes=Typed(ARRAY, sizes), ple__head_offsets=Typed(ARRAY, offsets))
    return model.write(path)


def bytes_in_memory(path: Path) -> int:
    """Of a file, whoever brought them there."""
    n = path.stat().st_size
    pages = np.zeros(-(-n // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        found = pages.ctypes.data_as(ctypes.c_void_p)
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(n), found)
    return int((pages & 1).sum()) * mmap.PAGESIZE


def forget(path: Path) -> bool:
    """Write a file to its disk and have the kernel drop it from memory; False: it keeps it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return bytes_in_memory(path) < LARGE / 64


async def test_neighbours_of_rows_stay_on_the_disk(tmp_path: Path) -> None:
    path = with_large_table(tmp_path / "model.gguf")
    if not forget(path):
        pytest.skip("files here are always in memory")
    config = runtime.EngineConfig(model=str(path), device="cpu", n_threads=2, n_ctx=512)
    async with runtime.open_engine(config) as engine:
        before = bytes_in_memory(path)
        answer = ids(await read(engine, [5, 9, 14, 3, 60], GREEDY(max_tokens=24, ignore_eos=True)))
        assert len(answer) == 24
        brought = bytes_in_memory(path) - before
    n_rows = (5 + 24) * HEADS
    assert brought <= 2 * mmap.PAGESIZE * n_rows


async def test_rows_of_prompts_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some are absent; every page that a row lies on, and none twice."""
    asked: list[int] = []
    monkeypatch.setattr(ngram_rows, "want_pages", lambda at, n_bytes: asked.append(at))
    with open_model(with_large_table(tmp_path / "model.gguf")) as model:
        memory = next(layer.memory for layer in model.spec.layers if layer.memory is not None)
        table, step = NgramRows(memory, model.weights[memory.table]), step_of(2, 2 * FEW_TOKENS - 2)
        monkeypatch.setattr(ngram_rows, "are_pages_here", lambda *_: True)
        rows = await table.blocks(step)
        assert not asked
        monkeypatch.setattr(ngram_rows, "are_pages_here", lambda *_: False)
        assert np.array_equal(await table.blocks(step), rows)
        data = model.weights[memory.table].data
        size = data.shape[-1]
        places = (data.ctypes.data + table._wanted(step) * size).ravel().tolist()
        ends = {end // mmap.PAGESIZE for at in places for end in (at, at + size - 1)}
        assert asked == [page * mmap.PAGESIZE for page in sorted(ends)]
