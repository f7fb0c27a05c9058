"""A file that is not in memory is asked for in the order in which it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import BUNDLED_MODEL
from runtime.engine import read_ahead as module
from runtime.engine.read_ahead import read_ahead, spans_of
from runtime.experts.host_memory import HostMemory
from runtime.models import Model, open_model
from tests.support.machine_files import machine_files


@pytest.fixture
def model() -> Iterator[Model]:
    with open_model(BUNDLED_MODEL) as opened:
        yield opened


def test_what_every_token_needs_comes_first(model: Model) -> None:
    spans = spans_of(model, None)
    assert sum(n_bytes for _, n_bytes in spans) == sum(w.n_bytes for w in model.weights.values())
    n_dense = len(spans) - 3 * len(model.spec.layers)
    names = {model.weights[name].address: name for name in model.weights}
    assert all("exps" in names[address] for address, _ in spans[n_dense:])
    assert not any("exps" in names[address] for address, _ in spans[:n_dense])
    assert spans[:n_dense] == sorted(spans[:n_dense])
    total = sum(n_bytes for _, n_bytes in spans)
    assert spans_of(model, total) == spans and spans_of(model, total - 1) == spans[:n_dense]


def test_all_is_asked_for_in_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "want_pages", lambda *span: asked.append(span))
    with read_ahead(model) as thread:
        thread.join()
    assert max(n_bytes for _, n_bytes in asked) == 1000
    assert sum(n_bytes for _, n_bytes in asked) == sum(w.n_bytes for w in model.weights.values())


def test_the_end_of_the_block_ends_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "want_pages", lambda address, n_bytes: asked.append(n_bytes))
    memory = HostMemory(machine_files(tmp_path, total=1 << 20, available=1 << 20))
    with read_ahead(model, memory) as thread:
        thread.join()
    assert sum(asked) < sum(w.n_bytes for w in model.weights.values()) / 2, "no routed experts"
    assert not thread.is_alive()
