"""Which launches start early: many, but for those beside branches; see `test_gpu_early_starts`."""

from __future__ import annotations

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
async def test_many_start_early_and_none_that_may_run_late(name: str, tmp_path: Path) -> None:
    plan = await decode_plan(name, tmp_path)
    launches = plan.launches
    early = early_starts(plan)
    assert sum(early) > len(launches) // 3 and not any(early[:FIRST])
    late = [bool(n.arguments.get("late")) or "narrow" in n.arguments for n in launches]
    older = any(
        is_early and n.kernel.source in OLDER for n, is_early in zip(launches, early, strict=True)
    )
    assert (any(late) and older) or name == "olmoe"
    assert not any(is_late and is_early for is_late, is_early in zip(late, early, strict=True))


@pytest.mark.parametrize("name", ["glm-5.3-flash", "qwen3.8-flash-next"])
async def test_products_before_results_return_start_early(name: str, tmp_path: Path) -> None:
    plan = await decode_plan(name, tmp_path)
    starts = {launch.name for launch in started(plan)}
    outputs = {n.name for n in plan.launches if n.name.endswith("attention_output")}
    assert outputs and outputs <= starts


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
