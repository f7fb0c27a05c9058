"""What the buffers of a CPU executor take: as planned without them, as counted, as touched."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import runtime
from ops.cpu.ledger import Ledger
from ops.cpu.program import aligned, filled
from runtime.engine.machine import MachineFacts
from runtime.engine.planning import plan_engine
from runtime.models import open_model
from tests.support.tiny_models import TINY_MODELS

PAGE_BYTES = 4096
PRESENT = np.uint64(63)


def n_touched(arrays: list[NDArray[np.uint8]]) -> int:
    """Bytes of their pages that the system has given memory to."""
    pages: set[int] = set()
    for array in arrays:
        first = array.ctypes.data // PAGE_BYTES
        n_pages = -(-(array.ctypes.data + array.nbytes) // PAGE_BYTES) - first
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(8 * first)
            entries = np.frombuffer(file.read(8 * n_pages), np.uint64)
        pages.update((first + np.flatnonzero(entries >> PRESENT)).tolist())
    return PAGE_BYTES * len(pages)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
@pytest.mark.parametrize("n_batch", [3, 700])
async def test_the_plan_is_what_an_engine_counts(name: str, n_batch: int, tmp_path: Path) -> None:
    path = TINY_MODELS[name]().write(tmp_path / "model.gguf")
    config = runtime.EngineConfig(
        model=path,
        device="cpu",
        n_ctx=1024,
        n_batch=n_batch,
        n_parallel=2,
        n_threads=2,
        cache_type_k="f32" if n_batch == 3 else "f16",
        cache_type_v="f32" if n_batch == 3 else "f16",
    )
    with open_model(path) as model:
        planned = plan_engine(model, config, MachineFacts((), 1 << 34, 1))
    async with runtime.open_engine(config) as engine:
        assert engine.plan is not None
        plans = [{part.name: part.n_bytes for part in plan.host} for plan in (planned, engine.plan)]
        assert plans[0]["activations"] == plans[1]["activations"]
        assert plans[0]["activations"] == engine.executor.describe()["activation_bytes"]


@pytest.mark.parametrize("n_batch", [256, 4096])
async def test_a_full_step_touches_what_is_planned(
    n_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the pages of small arrays, and those that the allocator clears by hand."""
    arrays: list[weakref.ref[NDArray[np.uint8]]] = []
    zeros = Ledger.zeros

    def noted(self: Ledger, n_bytes: int) -> NDArray[np.uint8]:
        made = zeros(self, n_bytes)
        arrays.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Ledger, "zeros", noted)
    config = runtime.EngineConfig(device="cpu", n_batch=n_batch, n_ctx=8192, n_threads=2)
    async with runtime.open_engine(config) as engine:
        planned = engine.executor.describe()["activation_bytes"]
        ids = [7 + i % 5000 for i in range(n_batch + 9)]
        async for _ in engine.generate(ids, runtime.SamplingParams.greedy(max_tokens=2)):
            pass
        held = [made for array in arrays if (made := array()) is not None]
        assert isinstance(planned, int)
        assert 0.9 * planned < n_touched(held) < 1.25 * planned
        assert sum(array.nbytes for array in held) > planned  # the logits of 4 sequences


def test_a_dry_ledger_takes_nothing() -> None:
    with Ledger(dry=True) as ledger:
        large = aligned((1 << 20, 1 << 20), np.uint8)
        table = filled((3, 5), lambda: pytest.fail("nobody needs the values"))
        with Ledger() as inner:
            kept = filled((2,), lambda: np.array([1.0, 2.0]))
            assert kept.tolist() == [1.0, 2.0]
        assert inner.n_bytes == kept.nbytes + 64
        large[5, 5] = 1
        assert n_touched([large[:1000].reshape(-1)]) == PAGE_BYTES
        assert ledger.n_bytes == large.nbytes + table.nbytes + 2 * 64
        del large
        assert ledger.n_bytes == table.nbytes + 64
    assert not aligned((4,), np.int32).any() and ledger.n_bytes == table.nbytes + 64
