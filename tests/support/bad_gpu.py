"""A machine whose GPU fails on demand, for tests of opening an engine and of its bad days."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from runtime.config import ContextShape, EngineConfig
from runtime.cuda import module as module_file
from runtime.cuda.driver import initialized
from runtime.engine import placement
from runtime.engine.executor import ExecutorLimits
from runtime.engine.fake_executor import FakeExecutor
from runtime.engine.gpu import transfer
from runtime.engine.placement import Ready
from runtime.experts.self_test import SelfTest
from tests.support.fake_driver import ALLOCATING, FakeDriver
from tests.support.stub_kernels import StubKernels

Site = tuple[object, ...]
"""A driver's function, then files and lines."""


class BadDriver(FakeDriver):
    """`sites` counts the allocating calls of every line of the runtime; the `failing` one, a site
    and how often it was reached before, finds no memory."""

    def __init__(self) -> None:
        super().__init__(memory_bytes=1 << 30)
        self.kernels = StubKernels()
        self.sites: Counter[Site] = Counter()
        self.failing: tuple[Site, int] | None = None

    def _may_fail(self, name: str) -> None:
        if name in ALLOCATING:
            site = (name, *lines_of_the_runtime(sys._getframe(1)))
            if self.failing == (site, self.sites[site]):
                self.out_of_memory_at = self.n_allocating
            self.sites[site] += 1
        super()._may_fail(name)


def lines_of_the_runtime(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """The files and lines that lead to a driver call."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/runtime/engine/gpu/" in path or "/runtime/experts/" in path:
            yield path, frame.f_lineno
        frame = frame.f_back


def bad_machine(patch: pytest.MonkeyPatch, cubins: Path) -> BadDriver:
    """The driver of the machine's GPU; its CPU executor computes nothing and is there at once.

    cubins: where assembled kernels are kept
    """
    fake = BadDriver()
    patch.setattr("runtime.cuda.driver.open_driver", lambda: initialized(fake, "13.4.4"))
    patch.setattr(module_file, "default_directory", lambda: cubins)
    patch.setattr(transfer, "THREADS", 1)  # each has a stream of its own, if a piece is left for it
    patch.setattr("runtime.experts.self_test.self_test", lambda *args: SelfTest(1, 1.0))
    patch.setattr(placement, "DEVICES", {**placement.DEVICES, "cpu": fake_cpu})
    return fake


def fake_cpu(model: Any, *others: Any) -> Ready:
    limits = ExecutorLimits(
        n_vocab=model.spec.n_vocab, n_pages=8, page_tokens=32, max_step_tokens=4, max_sequences=2
    )
    return Ready(FakeExecutor(limits), ContextShape(256, 1, 256))


def config_of(path: Path, device: str = "cuda", **settings: Any) -> EngineConfig:
    sizes = {"n_ctx": 256, "n_parallel": 1, "n_batch": 2, "n_threads": 1}
    return EngineConfig(model=path, device=device, **{**sizes, **settings})
