"""Launches that run beside their predecessor: it makes nothing that they read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.synthetic import write_model
from runtime.engine.gpu.early_starts import FIRST, OLDER, early_starts
from runtime.engine.gpu.launch_plan import Constants, Fork, Join, LaunchPlan, PlannedLaunch
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.bench.test_shapes import small
from tests.engine.test_gpu_executor import executor_of
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.support.cpu_steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = ["glm-5.3-flash", "qwen3.8-flash-next", "olmoe"]

READ = ("records", "gate", "up", "keys", "queries", "scores", "narrow")
"""Arguments of late launches that say what they read of a step's data."""

WRITTEN = (
    "y", "out_f32", "q8_256", "q8_32", "out", "h", "experts", "choices", "weights", "qkv", "plain",
)  # fmt: skip
"""Arguments of any launch that may say where it writes."""

READ_BEFORE = {("mix_streams.ptx", 2): ("x", "mix"), ("gate_streams.ptx", 1): ("returns",)}
"""What launches of `OLDER` read of a step's data before they wait, by how results return."""


def addresses(launch: PlannedLaunch, names: tuple[str, ...]) -> set[int]:
    return {int(launch.arguments.get(name, 0)) for name in names} - {0}


async def decode_plan(name: str, tmp_path: Path, **settings: int) -> LaunchPlan:
    """The launches of a step of one token."""
    write_model(tmp_path / "model.gguf", small(name), 4, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
            token = np.array([5], np.int32)
            step = step_of(executor, StepKind.DECODE, [(0, token, 0)], texts={0: token})
            shape = executor._parts.shapes.of(step)
            return executor._parts.steps._plan(shape, Constants())[0].plan


def started(plan: LaunchPlan) -> list[PlannedLaunch]:
    """The launches of a plan that start early."""
    pairs = zip(plan.launches, early_starts(plan), strict=True)
    return [launch for launch, early in pairs if early]


@pytest.mark.parametrize("name", NAMES)
async def test_no_late_launch_reads_what_the_one_before_it_makes(name: str, tmp_path: Path) -> None:
    launches = (await decode_plan(name, tmp_path)).launches
    late = 0
    for before, launch in pairwise(launches):
        if launch.arguments.get("late") or "narrow" in launch.arguments:
            assert not addresses(launch, READ) & addresses(before, WRITTEN), launch.name
            late += 1
    assert late > 0 or name == "olmoe"


@pytest.mark.parametrize("name", NAMES)
async def test_launches_that_start_early_read_what_is_three_before_them(
    name: str, tmp_path: Path
) -> None:
    plan = await decode_plan(name, tmp_path)
    launches = plan.launches
    early = early_starts(plan)
    assert sum(early) > len(launches) // 3 and not any(early[:FIRST])
    older = 0
    for n, launch in enumerate(launches):
        if launch.arguments.get("late") or "narrow" in launch.arguments:
            assert not early[n], launch.name
        if names := READ_BEFORE.get((launch.kernel.source, launch.arguments.get("returning", 0))):
            assert early[n] and not early[n - 1], launch.name
            made = addresses(launch, names)
            for before in launches[n - 2 : n]:
                assert not made & {int(value) for value in before.arguments.values()}, launch.name
            older += 1
    assert {source for source, _ in READ_BEFORE} == OLDER
    assert older > 0 or name == "olmoe"


@pytest.mark.parametrize("name", NAMES)
async def test_beside_mailboxes_all_start_early_that_touch_no_branch(
    name: str, tmp_path: Path
) -> None:
    resident = await decode_plan(name, tmp_path)
    alone = {launch.name for launch in started(resident)}
    plan = await decode_plan(name, tmp_path, moe_expert_cache=2, exchange_rounds=0, n_threads=2)
    forks = [n for n, node in enumerate(plan.nodes) if isinstance(node, Fork)]
    assert len(forks) == sum("mailbox" in launch.name for launch in plan.launches) > 0
    beside = {launch.name for launch in started(plan)}
    for n, node in enumerate(plan.nodes):
        if isinstance(node, Fork | Join):
            behind = next(
                node for node in plan.nodes[n:] if isinstance(node, PlannedLaunch) and not node.side
            )
            assert behind.name not in beside
            alone.discard(behind.name)
    assert not any(launch.side for launch in started(plan))
    assert alone <= beside


async def test_nothing_starts_early_where_experts_are_fetched(tmp_path: Path) -> None:
    plan = await decode_plan("olmoe", tmp_path)
    assert started(plan)
    with plan.side_branch():
        plan.mark(0)
    plan.join(0)
    assert not started(plan)
