"""Whole models of real shapes, planned: no launch has more blocks than a GPU takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.synthetic import MODELS
from bench.whole_model import held
from runtime.engine.gpu import captured_steps
from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.engine.gpu.step_shape import StepShape

MOST_BLOCKS = (2**31 - 1, 65535, 65535)


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.8-flash-next", "mimo-v2.6-flash"])
def test_grids_of_long_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = dict[str, int]()

    def look(shape: StepShape, launches: list[PlannedLaunch]) -> Iterator[str]:
        largest["tokens"] = max(largest.get("tokens", 0), shape.n_tokens)
        for launch in launches:
            for blocks, most in zip(launch.grid, MOST_BLOCKS, strict=False):
                assert 0 < blocks <= most, (launch.name, launch.grid)
        return iter(())

    monkeypatch.setattr(captured_steps, "slow_launches", look)
    found = held(MODELS[name], 22.0, 4400, 4096)
    assert found.n_batch == 4096 and found.fetch_bytes > 0
    assert largest["tokens"] == (2048 if name.startswith("glm") else 4096)
