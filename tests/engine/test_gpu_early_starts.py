"""No launch reads before its wait what one that may still run makes: by the texts and the plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.synthetic import write_model
from bench.synthetic.models import Shape
from runtime.engine.gpu import captured_steps, early_starts
from runtime.engine.gpu.launch_plan import Constants, Fork, PlannedLaunch
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.gpu.step_shape import Sampling, StepShape
from runtime.engine.step import StepKind
from runtime.models import open_model
from tests.bench.test_shapes import SMALL, small
from tests.engine.test_gpu_executor import executor_of
from tests.engine.test_gpu_hybrid import hybrid_driver
from tests.support.launch_reach import SpreadRoom, collisions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ONE = StepShape(StepKind.DECODE, 1, 1, 1, 512, gathered=False, sampling=Sampling.CHAIN)
SHAPES = (
    ONE,
    replace(ONE, timed=True),
    replace(ONE, n_tokens=4, n_sequences=4, n_outputs=4),
    replace(ONE, kind=StepKind.PREFILL, n_tokens=64, n_sequences=2, gathered=True),
)
MISSES = {"moe_expert_cache": 2, "exchange_rounds": 0, "n_threads": 2}


@pytest.fixture(autouse=True)
def spread_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "Room", SpreadRoom)


async def plans(
    model_shape: Shape, tmp_path: Path, shapes: tuple[StepShape, ...], **settings: int
) -> list[PlanParts]:
    """The launches of steps of these shapes."""
    write_model(tmp_path / "model.gguf", model_shape, 4, 0.5)
    with open_model(tmp_path / "model.gguf") as model:
        async with executor_of(model, tmp_path, hybrid_driver(), **settings) as executor:
            steps = executor._parts.steps
            return [steps._plan(shape, Constants())[0] for shape in shapes]


@pytest.mark.parametrize("name", SMALL)
async def test_what_is_read_before_the_wait_has_been_made(name: str, tmp_path: Path) -> None:
    for parts in await plans(small(name), tmp_path, SHAPES):
        assert list(collisions(parts)) == [], parts.shape


@pytest.mark.parametrize("name", ["olmoe", "glm-5.3-flash"])
async def test_it_has_beside_mailboxes_too(name: str, tmp_path: Path) -> None:
    (parts,) = await plans(small(name), tmp_path, (ONE,), **MISSES)
    assert any(isinstance(node, Fork) for node in parts.plan.nodes)
    assert list(collisions(parts)) == []


async def test_it_has_where_gates_come_by_way_of_two_matrices(tmp_path: Path) -> None:
    shape = replace(small("glm-5.3-flash"), kda_dim=128, n_head=2)
    (parts,) = await plans(shape, tmp_path, (ONE,))
    names = [launch.name for launch in parts.plan.launches]
    early = dict(zip(names, early_starts.early_starts(parts.plan), strict=True))
    assert early["1.gates"] and names[names.index("1.gates") + 1] == "1.delta_inputs"
    assert list(collisions(parts)) == []


async def test_joins_of_chosen_keys_must_not_start_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did, and so could read of a step before how many keys were chosen."""
    monkeypatch.setattr(early_starts, "COUNTING", frozenset())
    (parts,) = await plans(small("qwen3.8-flash-next"), tmp_path, (ONE,))
    found = "3.attention_join: positions before the wait, ends of 3.index_select"
    assert list(collisions(parts)) == [found]


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        ("1.mixer_norm", "1.mixer_norm: expert_out before the wait, y of 0.experts.down"),
        ("1.attention", "1.attention: q before the wait, q of 1.heads"),
        ("1.experts.gate_up", "1.experts.gate_up: experts before the wait, experts of 1.route"),
    ],
)
async def test_a_kernel_that_reads_too_soon_is_found(
    launch: str, found: str, tmp_path: Path
) -> None:
    (parts,) = await plans(small("olmoe"), tmp_path, (ONE,))
    for n, node in enumerate(parts.plan.nodes):
        if isinstance(node, PlannedLaunch) and node.name == launch:
            kernel = replace(node.kernel)
            hasty = node.kernel.text.replace("griddepcontrol.wait;", "")
            object.__setattr__(kernel, "text", hasty)
            parts.plan.nodes[n] = replace(node, kernel=kernel)
    assert any(line.startswith(found) for line in collisions(parts))
