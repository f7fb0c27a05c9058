"""Waiting on the loop: others run meanwhile, errors come out, cancelling is clean."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from runtime.cuda import completion
from runtime.cuda.completion import reached
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver
from runtime.cuda.stream import Event, Stream
from runtime.errors import DeviceLost, EngineBug
from tests.cuda.conftest import Hold
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver


def test_it_returns_when_the_gpu_has_passed_and_others_run_before(
    device: Device, hold: Hold
) -> None:
    async def main() -> None:
        with Stream(device) as stream, Event(device) as event:
            with hold(stream):
                stream.record(event)
                waiting = asyncio.create_task(reached(event.passed))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not waiting.done()
            await asyncio.wait_for(waiting, 5)

    asyncio.run(main())


def test_long_waits_pause_and_still_end(device: Device, hold: Hold) -> None:
    looks = 0

    async def main() -> None:
        with Stream(device) as stream, Event(device) as event:

            def passed() -> bool:
                nonlocal looks
                looks += 1
                return event.passed()

            with hold(stream):
                stream.record(event)
                waiting = asyncio.create_task(reached(passed))
                await asyncio.wait([waiting], timeout=0.03)
                before = looks
                await asyncio.wait([waiting], timeout=0.03)
                assert 1 <= looks - before <= 40
            await asyncio.wait_for(waiting, 5)

    asyncio.run(main())


@pytest.mark.parametrize(("seconds", "sleeps"), [(6e-3, False), (60e-3, True)])
def test_it_sleeps_only_where_timers_are_fine_enough(
    seconds: float, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose time is not known yet is not noticed by a timer's resolution later."""
    now, pauses = 100.0, list[float]()

    async def sleep(pause: float) -> None:
        nonlocal now
        pauses.append(pause)
        now += pause or 1e-4

    monkeypatch.setattr(completion.asyncio, "sleep", sleep)
    monkeypatch.setattr(completion, "time", SimpleNamespace(monotonic=lambda: now))
    asyncio.run(reached(lambda: now >= 100.0 + seconds))
    long = [pause for pause in pauses if pause]
    assert bool(long) == sleeps and min(long, default=1e-3) >= 1e-3
    assert now - 100.0 <= seconds * 17 / 16 + 1e-4


def test_cancelling_stops_the_looking(device: Device, hold: Hold) -> None:
    async def main() -> None:
        with Stream(device) as stream, Event(device) as event, hold(stream):
            stream.record(event)
            waiting = asyncio.create_task(reached(event.passed))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_a_device_that_is_lost_meanwhile_ends_the_wait(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    async def main() -> None:
        with (
            Device(fake_driver) as device,
            Stream(device) as stream,
            Event(device) as event,
            fake.hold(stream.handle),
        ):
            stream.record(event)
            waiting = asyncio.create_task(reached(event.passed))
            await asyncio.sleep(0)
            fake.lost = CUresult["CUDA_ERROR_ECC_UNCORRECTABLE"]
            with pytest.raises(DeviceLost):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(main())


def test_blocking_the_loop_is_refused(device: Device) -> None:
    async def main() -> None:
        with Stream(device) as stream, pytest.raises(EngineBug, match="block the event loop"):
            stream.synchronize()

    asyncio.run(main())
