"""The same cases on the fake driver, always, and on a GPU where one exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ptx
from ops.gpu.kernel import PackedArguments
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, initialized, open_driver
from runtime.cuda.graph import Launch
from runtime.cuda.memory import PinnedBuffer
from runtime.cuda.module import Module
from runtime.cuda.stream import Stream
from runtime.errors import DeviceUnavailable
from tests.support.fake_driver import FakeDriver

HERE = Path(__file__).parent
FILL = ptx.expand("fill.ptx", root=HERE)
LATCH = ptx.expand("latch.ptx", root=HERE)

Hold = Callable[[Stream], AbstractContextManager[None]]


def pack(*values: int) -> PackedArguments:
    return PackedArguments(np.array(values, np.uint64))


def filled(value: int, n: int) -> NDArray[np.uint32]:
    """What the kernel fill writes."""
    i = np.arange(n, dtype=np.uint32)
    return np.where(i ^ 1 < n, i ^ 1, i) + np.uint32(value)


def fake_fill(span: Any, y: int, value: int, n: int) -> None:
    span(y, 4 * n)[:] = filled(value, n).view(np.uint8)


@pytest.fixture
def fake() -> FakeDriver:
    fake = FakeDriver()
    fake.kernels["fill"] = fake_fill
    return fake


@pytest.fixture
def fake_driver(fake: FakeDriver) -> Driver:
    return initialized(fake, "13.4.4")


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest, fake_driver: Driver) -> Driver:
    if request.param == "fake":
        return fake_driver
    try:
        return open_driver()
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def device(driver: Driver) -> Iterator[Device]:
    """An open device on which the test leaves nothing open."""
    with Device(driver) as device:
        yield device
        assert device.open_resources == ()


@pytest.fixture
def hold(device: Device) -> Hold:
    """`with hold(stream):` what is put into the stream after this waits until the end."""

    @contextmanager
    def held(stream: Stream) -> Iterator[None]:
        if isinstance(device.driver.api, FakeDriver):
            with device.driver.api.hold(stream.handle):
                yield
            return
        with PinnedBuffer(device, 4096) as word, Module(device, LATCH, "latch") as module:
            Launch(module.function("latch"), (1, 1, 1), 1, pack(word.address)).enqueue(stream)
            try:
                yield
            finally:
                word.view[0] = 1
                device.call("cuStreamSynchronize", stream.handle)

    return held
