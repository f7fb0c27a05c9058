"""Launches and graphs write what the kernel writes; a failed capture leaves the stream whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from runtime.cuda.graph import EDGES_SINCE, USE_NODE_PRIORITY, Graph, Launch
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.cuda.module import Function, Module
from runtime.cuda.stream import Event, Stream
from runtime.errors import EngineBug
from tests.cuda.conftest import FILL, Hold, filled, pack
from tests.support.fake_driver import FakeDriver

N = 1001


class Bench:
    """A stream, a kernel, and a u32[N] on both sides."""

    def __init__(
        self, stream: Stream, function: Function, buffer: DeviceBuffer, host: PinnedBuffer
    ) -> None:
        self.stream = stream
        self.function = function
        self.buffer = buffer
        self.host = host

    def launch(self, value: int, *, overlapped: bool = False, early: bool = False) -> Launch:
        arguments = pack(self.buffer.address, value, N)
        grid = (-(-N // 128), 1, 1)
        return Launch(self.function, grid, 128, arguments, overlapped=overlapped, early=early)

    def read(self) -> NDArray[np.uint32]:
        self.stream.download(self.host.host, self.buffer.address, 4 * N)
        self.stream.synchronize()
        return self.host.view[: 4 * N].view(np.uint32).copy()


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    with (
        Stream(device) as stream,
        Module(device, FILL, "fill") as module,
        DeviceBuffer(device, 4 * N) as buffer,
        PinnedBuffer(device, 4 * N) as host,
    ):
        yield Bench(stream, module.function("fill"), buffer, host)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_launch_runs_its_kernel(bench: Bench, overlapped: bool) -> None:
    if overlapped and bench.stream.device.info.capability < (9, 0):
        pytest.skip("overlapped launches need compute capability 9.0")
    launch = bench.launch(70, overlapped=overlapped)
    launch.enqueue(bench.stream)
    np.testing.assert_array_equal(bench.read(), filled(70, N))


def test_capturing_runs_nothing_and_launching_runs_it_each_time(bench: Bench) -> None:
    bench.stream.fill(bench.buffer.address, 0, 4 * N)
    with Graph(bench.stream, lambda: bench.launch(9).enqueue(bench.stream)) as graph:
        assert not bench.read().any()
        graph.upload(bench.stream)
        for _ in range(2):
            graph.launch(bench.stream)
            np.testing.assert_array_equal(bench.read(), filled(9, N))
            bench.stream.fill(bench.buffer.address, 0, 4 * N)


def test_a_captured_launch_starts_early_if_asked(bench: Bench, device: Device) -> None:
    if device.info.capability < (9, 0):
        pytest.skip("overlapped launches need compute capability 9.0")
    first, second = (bench.launch(9, overlapped=True, early=early) for early in (False, True))

    def work() -> None:
        first.enqueue(bench.stream)
        second.enqueue(bench.stream)

    with Graph(bench.stream, work) as graph:
        graph.launch(bench.stream)
        np.testing.assert_array_equal(bench.read(), filled(9, N))
    second.enqueue(bench.stream)
    bench.stream.synchronize()
    if isinstance(fake := device.driver.api, FakeDriver):
        assert fake.early_starts == 1


def test_a_driver_without_such_edges_starts_nothing_early(fake: FakeDriver) -> None:
    fake.version = EDGES_SINCE - 1
    with (
        Device(initialized(fake, "12.6.0")) as device,
        Stream(device) as stream,
        Module(device, FILL, "fill") as module,
        DeviceBuffer(device, 4 * N) as buffer,
    ):
        arguments = pack(buffer.address, 9, N)
        launch = Launch(
            module.function("fill"), (8, 1, 1), 128, arguments, overlapped=True, early=True
        )

        def work() -> None:
            launch.enqueue(stream)
            launch.enqueue(stream)

        with Graph(stream, work):
            assert fake.early_starts == 0


def test_a_side_branch_is_captured_with_its_stream(bench: Bench, device: Device) -> None:
    with Stream(device) as side, Event(device) as fork, Event(device) as join:

        def work() -> None:
            bench.stream.record(fork)
            side.wait_for(fork)
            bench.launch(1).enqueue(side)
            side.record(join)
            bench.stream.wait_for(join)
            bench.launch(2).enqueue(bench.stream)

        with Graph(bench.stream, work) as graph:
            graph.launch(bench.stream)
            np.testing.assert_array_equal(bench.read(), filled(2, N))


def test_nodes_keep_their_streams_priorities_if_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, flags = bench.stream.device, []
    call = device.call

    def recorded(name: str, *arguments: Any) -> Any:
        if name == "cuGraphInstantiate":
            flags.append(arguments[1])
        return call(name, *arguments)

    monkeypatch.setattr(device, "call", recorded)
    for node_priorities in (False, True):
        with Graph(
            bench.stream,
            lambda: bench.launch(1).enqueue(bench.stream),
            node_priorities=node_priorities,
        ):
            pass
    assert flags == [0, USE_NODE_PRIORITY]


def test_a_capture_that_raises_leaves_the_stream_usable(bench: Bench) -> None:
    def work() -> None:
        bench.launch(3).enqueue(bench.stream)
        raise KeyError("layer")

    with pytest.raises(KeyError):
        Graph(bench.stream, work)
    bench.launch(4).enqueue(bench.stream)
    np.testing.assert_array_equal(bench.read(), filled(4, N))


def test_a_stream_waits_for_an_event_of_another(bench: Bench, device: Device, hold: Hold) -> None:
    with Stream(device) as first, Event(device) as written:
        with hold(first):
            bench.launch(5).enqueue(first)
            first.record(written)
            bench.stream.wait_for(written)
            bench.launch(6).enqueue(bench.stream)
            assert not written.passed()
        np.testing.assert_array_equal(bench.read(), filled(6, N))


def test_timed_events_tell_the_time_between_them(bench: Bench, device: Device) -> None:
    with Event(device, timed=True) as begin, Event(device, timed=True) as end:
        bench.stream.record(begin)
        bench.launch(8).enqueue(bench.stream)
        bench.stream.record(end)
        bench.stream.synchronize()
        assert 0 < end.milliseconds_since(begin) < 1000


def test_the_time_between_events_is_asked_for_behind_them(device: Device, hold: Hold) -> None:
    with Stream(device) as stream, Event(device, timed=True) as event, hold(stream):
        stream.record(event)
        with pytest.raises(EngineBug, match="before they were passed"):
            event.milliseconds_since(event)
