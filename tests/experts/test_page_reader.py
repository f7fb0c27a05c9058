"""Experts that a step misses are asked for whole, where they may be on a disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ops.exchange import MISSES, N_MISSES, POSTED, sequence
from runtime.experts import page_reader as module
from runtime.experts.host_experts import layer_experts
from runtime.experts.host_memory import HostMemory
from runtime.experts.page_reader import missed, page_reader
from tests.support.machine_files import machine_files
from tests.support.moe_layers import MoeLayers

N_EXPERT = 8


@pytest.fixture
def layers() -> MoeLayers:
    made = MoeLayers()
    for _ in range(3):
        made.add("Q8_0", "Q8_0", (64, 96), N_EXPERT, 2)
    return made


def post(exchange: np.ndarray, number: int, experts: list[int]) -> None:
    """As the GPU does: slots and experts, how many, then the layer's number."""
    words = [slot | expert << 16 for slot, expert in enumerate(experts)]
    exchange[MISSES:][: 4 * len(words)].view(np.uint32)[:] = words
    exchange[N_MISSES:][:4].view(np.uint32)[0] = len(words)
    exchange[POSTED:][:4].view(np.uint32)[0] = number


def short(tmp_path: Path) -> HostMemory:
    return HostMemory(machine_files(tmp_path, total=1 << 14, available=1 << 14))


def test_missed_experts_are_asked_for(
    layers: MoeLayers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "want_pages", lambda *span: asked.append(span))
    experts = [layer_experts(layers.weights, spec) for spec in layers.specs]
    exchange = np.zeros(4096, np.uint8)
    with page_reader(exchange, experts, short(tmp_path)) as thread:
        for epoch, layer, chosen in ((1, 2, [3, 5, 3]), (2, 0, [7]), (2, 1, [N_EXPERT, 1])):
            before = len(asked)
            post(exchange, sequence(epoch, 3, layer), chosen)
            known = sorted({expert for expert in chosen if expert < N_EXPERT})
            while len(asked) < before + 3 * len(known):
                pass
            wanted = [
                (matrix.host + expert * matrix.stride, matrix.n_bytes)
                for expert in known
                for matrix in experts[layer].matrices
            ]
            assert asked[before:] == wanted
    assert thread is not None and not thread.is_alive()


def test_where_the_memory_holds_all_nobody_reads(layers: MoeLayers, tmp_path: Path) -> None:
    experts = [layer_experts(layers.weights, spec) for spec in layers.specs]
    exchange, files = (
        np.zeros(4096, np.uint8),
        machine_files(tmp_path, total=1 << 40, available=1 << 39),
    )
    with page_reader(exchange, experts, HostMemory(files)) as thread:
        assert thread is None
    with page_reader(exchange, experts, HostMemory(tmp_path / "none")) as thread:
        assert thread is None


def test_a_number_of_misses_that_cannot_be_is_harmless() -> None:
    """It is read while the GPU writes."""
    exchange = np.zeros(MISSES + 10, np.uint8)
    exchange[N_MISSES:][:4].view(np.uint32)[0] = 1 << 31
    exchange[MISSES:][:8].view(np.uint32)[:] = 5 << 16, 9 << 16
    assert missed(exchange, 8) == [5]
