"""Launches that run beside their predecessor: it makes nothing that they read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.synthetic import write_model
from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.bench.test_shapes import small
from tests.engine.test_gpu_executor import executor_of
from tests.support.cpu_steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

READ = ("records", "gate", "up", "keys", "queries", "scores", "narrow")
"""Arguments of late launches that say what they read of a step's data."""

WRITTEN = (
    "y", "out_f32", "q8_256", "q8_32", "out", "h", "experts", "choices", "weights", "qkv", "plain",
)  # fmt: skip
"""Arguments of any launch that may say where it writes."""


def addresses(launch: PlannedLaunch, names: tuple[str, ...]) -> set[int]:
    return {int(launch.arguments.get(name, 0)) for name in names} - {0}


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.8-flash-next", "olmoe"])
async def test_no_late_launch_reads_what_the_one_before_it_makes(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", small(name), 4, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        async with executor_of(model, tmp_path) as executor:
            token = np.array([5], np.int32)
            step = step_of(executor, StepKind.DECODE, [(0, token, 0)], texts={0: token})
            shape = executor._parts.shapes.of(step)
            launches = [planned for planned, _ in executor._parts.steps.launches(shape)]
    late = 0
    for before, launch in pairwise(launches):
        if launch.arguments.get("late") or "narrow" in launch.arguments:
            assert not addresses(launch, READ) & addresses(before, WRITTEN), launch.name
            late += 1
    assert late > 0 or name == "olmoe"
