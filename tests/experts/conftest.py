"""A fake GPU that has to be left empty, and two layers of experts to put on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from tests.support.fake_driver import FakeDriver
from tests.support.moe_layers import MoeLayers


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver(memory_bytes=1 << 26)


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(initialized(fake, "13.4.4")) as opened:
        yield opened
    assert fake.live == {}


@pytest.fixture
def layers() -> MoeLayers:
    made = MoeLayers()
    made.add("Q4_K", "Q6_K", (256, 256), 8, 2)
    made.add("Q8_0", "Q8_0", (64, 96), 6, 2)
    return made
