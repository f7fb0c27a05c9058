"""Two GPUs that reach each other's memory, or do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.errors import CudaError
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def fake() -> FakeDriver:
    fake = FakeDriver()
    fake.n_devices = 2
    return fake


@pytest.fixture
def pair(fake: FakeDriver) -> Iterator[tuple[Device, Device]]:
    driver = initialized(fake, "13.4.4")
    with Device(driver, 0) as first, Device(driver, 1) as second:
        yield first, second


def test_peers_may_be_asked_for_twice(pair: tuple[Device, Device]) -> None:
    first, second = pair
    assert first.reach(second) and first.reach(second) and second.reach(first)


def test_gpus_that_cannot_stay_apart(fake: FakeDriver, pair: tuple[Device, Device]) -> None:
    fake.peer_access = False
    assert not pair[0].reach(pair[1])
    assert fake.calls["cuCtxEnablePeerAccess"] == 0


@pytest.mark.parametrize("code", ["PEER_ACCESS_UNSUPPORTED", "ILLEGAL_ADDRESS"])
def test_a_refusal_is_told_from_an_error(
    fake: FakeDriver, pair: tuple[Device, Device], code: str
) -> None:
    fake.fail["cuCtxEnablePeerAccess"] = CUresult[f"CUDA_ERROR_{code}"]
    if code == "PEER_ACCESS_UNSUPPORTED":
        assert not pair[0].reach(pair[1])
        return
    with pytest.raises(CudaError):
        pair[0].reach(pair[1])


def test_each_gpu_has_its_own_memory(fake: FakeDriver, pair: tuple[Device, Device]) -> None:
    first, second = pair
    free = second.free_bytes()
    with DeviceBuffer(first, 4096):
        assert second.free_bytes() == free > first.free_bytes()


def test_pinned_memory_has_an_address_everywhere(pair: tuple[Device, Device]) -> None:
    first, second = pair
    with PinnedBuffer(first, 4096) as pinned:
        assert pinned.address_on(first) == pinned.address
        assert pinned.address_on(second)
