"""Fixtures: a fake GPU that has to be left empty.  Conftest files take them from here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver(memory_bytes=1 << 26)


@pytest.fixture
def device(fake: FakeDriver) -> Iterator[Device]:
    with Device(initialized(fake, "13.4.4")) as opened:
        yield opened
    assert fake.live == {}
