"""Opening and closing a device: what it says, what it reports, what a failure leaves behind."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, initialized
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import Arena, DeviceBuffer, PinnedBuffer
from runtime.cuda.module import CubinCache, Module
from runtime.cuda.stream import Event, Stream
from runtime.errors import CudaError, DeviceError, DeviceLost, DeviceUnavailable
from tests.cuda.conftest import FILL, pack
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver


def everything(driver: Driver, cache: CubinCache) -> None:
    """Open one of each kind, run a graph, and close it all."""
    with ExitStack() as stack:
        device = stack.enter_context(Device(driver))
        stream = stack.enter_context(Stream(device))
        side = stack.enter_context(Stream(device))
        events = [stack.enter_context(Event(device)) for _ in range(2)]
        buffer = stack.enter_context(DeviceBuffer(device, 256))
        stack.enter_context(Arena(device, {100: 3}))
        stack.enter_context(PinnedBuffer(device, 4096))
        module = stack.enter_context(Module(device, FILL, "fill", cache))
        function = module.function("fill")
        function.allow_shared_bytes(64 << 10)
        launch = Launch(function, (1, 1, 1), 64, pack(buffer.address, 5, 64))

        def work() -> None:
            stream.record(events[0])
            side.wait_for(events[0])
            launch.enqueue(side)
            side.record(events[1])
            stream.wait_for(events[1])

        graph = stack.enter_context(Graph(stream, work))
        graph.upload(stream)
        graph.launch(stream)
        stream.synchronize()


def test_everything_opens_and_closes(driver: Driver, tmp_path: Path) -> None:
    everything(driver, CubinCache(tmp_path))
    if isinstance(driver.api, FakeDriver):
        assert driver.api.live == {}


def test_out_of_memory_at_each_allocation_in_turn_leaves_nothing(tmp_path: Path) -> None:
    whole = FakeDriver()
    whole.kernels["fill"] = lambda *args: None
    everything(initialized(whole, "13.4.4"), CubinCache(tmp_path / "whole"))
    assert whole.n_allocating > 15
    for nth in range(whole.n_allocating):
        fake = FakeDriver()
        fake.kernels["fill"] = lambda *args: None
        fake.out_of_memory_at = nth
        with pytest.raises(DeviceError):
            everything(initialized(fake, "13.4.4"), CubinCache(tmp_path / str(nth)))
        assert fake.live == {}, f"allocation {nth}"


def test_what_a_gpu_is(device: Device) -> None:
    info = device.info
    assert info.capability >= (8, 0)
    assert info.architecture.startswith("sm_")
    assert info.n_multiprocessors > 0
    assert info.block_shared_bytes >= 99 << 10
    assert 0 < device.free_bytes() <= info.memory_bytes
    assert info.name


def test_a_gpu_that_is_missing_or_too_old_is_refused(fake: FakeDriver, fake_driver: Driver) -> None:
    with pytest.raises(DeviceUnavailable, match="no GPU 1: this machine shows 1"):
        Device(fake_driver, 1)
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 7
    with pytest.raises(DeviceUnavailable, match=r"capability 7\.0; the kernels need 8\.0"):
        Device(fake_driver)
    assert fake.live == {}


def test_what_is_left_open_is_reported_and_released(
    fake: FakeDriver, fake_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Device(fake_driver) as device:
        DeviceBuffer(device, 512, "keys")
        Stream(device, "copies")
        assert [resource.label for resource in device.open_resources] == ["keys", "copies"]
    assert "DeviceBuffer 'keys' of 512 bytes, Stream 'copies'" in caplog.text
    assert fake.live == {}


def test_a_closed_device_is_unavailable(fake: FakeDriver, fake_driver: Driver) -> None:
    device = Device(fake_driver)
    device.close()
    device.close()
    assert fake.calls["cuDevicePrimaryCtxRelease"] == 1
    with pytest.raises(DeviceUnavailable, match="closed"):
        device.free_bytes()


def test_any_thread_may_call(device: Device) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(device.free_bytes()))
    thread.start()
    thread.join()
    assert seen
    assert seen[0] > 0


def test_a_lost_device_is_one_error_and_closes_quietly(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    with Device(fake_driver) as device, Stream(device) as stream, DeviceBuffer(device, 64):
        fake.lost = CUresult["CUDA_ERROR_ECC_UNCORRECTABLE"]
        with pytest.raises(DeviceLost, match="damaged"):
            stream.synchronize()


LOSE = """
from pathlib import Path
import numpy as np, ptx
from ops.gpu.kernel import PackedArguments
from runtime.cuda.device import Device
from runtime.cuda.driver import open_driver
from runtime.cuda.graph import Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.module import Module
from runtime.cuda.stream import Stream
from runtime.errors import DeviceLost
text = ptx.expand("fill.ptx", root=Path("tests/cuda"))
with (
    Device(open_driver()) as device, Stream(device) as stream, DeviceBuffer(device, 64),
    Module(device, text, "fill") as module,
):
    arguments = PackedArguments(np.array([64, 0, 32], np.uint64))
    Launch(module.function("fill"), (1, 1, 1), 32, arguments).enqueue(stream)
    try:
        stream.synchronize()
    except DeviceLost as error:
        print(error)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("driver", ["gpu"], indirect=True)
def test_a_real_device_that_is_lost_closes_quietly_too(driver: Driver) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LOSE]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS")


def test_an_index_outside_its_memory_ends_in_a_lost_device(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    with (
        Device(fake_driver) as device,
        Stream(device) as stream,
        DeviceBuffer(device, 64) as buffer,
        Module(device, FILL, "fill") as module,
    ):
        arguments = pack(buffer.address, 0, 17)
        Launch(module.function("fill"), (1, 1, 1), 32, arguments).enqueue(stream)
        with pytest.raises(DeviceLost, match="not its own"):
            stream.synchronize()


def test_a_thread_that_stays_makes_the_context_current_once(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_times, set_current = 0, fake._cuCtxSetCurrent

    def counted(context: object) -> None:
        nonlocal n_times
        n_times += 1
        set_current(context)

    monkeypatch.setattr(fake, "_cuCtxSetCurrent", counted)
    with Device(initialized(fake, "13.4.4")) as device:

        def work() -> None:
            with device.staying():
                for _ in range(3):
                    device.free_bytes()
            device.free_bytes()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert n_times == 2
        device.free_bytes()
        device.free_bytes()
        assert n_times == 4, "other threads make it current each time"


def test_a_thread_that_stays_with_one_gpu_may_call_another(fake: FakeDriver) -> None:
    fake.n_devices = 2
    driver = initialized(fake, "13.4.4")
    with Device(driver, 0) as first, Device(driver, 1) as second, first.staying():
        for device in (first, second, first):
            with DeviceBuffer(device, 256):
                assert fake._device_now() == device.info.index


def test_a_native_call_is_not_made_in_another_context(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    with Device(fake_driver) as device, Event(device) as event:
        assert event.passed()
        fake.fail["cuCtxSetCurrent"] = CUresult["CUDA_ERROR_INVALID_CONTEXT"]
        with pytest.raises(CudaError, match="INVALID_CONTEXT"):
            event.passed()
        del fake.fail["cuCtxSetCurrent"]
