"""The start-up test of the exchange passes where the exchange works, and only there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from ops.cpu.team import Team, acquire_team
from ops.gpu.kernel import Kernel
from runtime.cuda.device import Device
from runtime.cuda.module import Function, Module
from runtime.errors import DeviceUnavailable
from runtime.experts import self_test as module
from runtime.experts.self_test import LAYERS, self_test
from tests.support.fake_driver import FakeDriver

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def team() -> Iterator[Team]:
    with acquire_team(2) as shared:
        yield shared


@pytest.fixture(autouse=True)
def polling_kernels_let_the_team_work(fake: FakeDriver) -> None:
    fake.host = lambda: time.sleep(0)


@pytest.fixture
def function(device: Device) -> Iterator[Callable[[Kernel], Function]]:
    modules: dict[str, Module] = {}

    def load(kernel: Kernel) -> Function:
        if kernel.entry not in modules:
            modules[kernel.entry] = Module(device, kernel.text, kernel.entry)
        return modules[kernel.entry].function(kernel.entry)

    yield load
    for opened in modules.values():
        opened.close()


def test_it_passes(device: Device, team: Team, function: Callable[[Kernel], Function]) -> None:
    result = self_test(device, team, function, 2 * LAYERS - 1)
    assert result.rounds == 2 * LAYERS and result.microseconds > 0


def test_a_wrong_answer_is_noticed(
    device: Device,
    team: Team,
    function: Callable[[Kernel], Function],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = module._answers

    def other(*args: object) -> object:
        wrong = answers(*args)  # type: ignore[arg-type]
        wrong[3, 5] += 1
        return wrong

    monkeypatch.setattr(module, "_answers", other)
    with pytest.raises(DeviceUnavailable, match="7 of 50 answers of step 1 are wrong"):
        self_test(device, team, function, 1)
