"""Device buffers, pinned memory and arenas: given back once, refused with figures."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from runtime.cuda.copies import CopyBatch
from runtime.cuda.device import Device
from runtime.cuda.driver import Driver, initialized
from runtime.cuda.memory import Arena, DeviceBuffer, PinnedBuffer, RegisteredMemory, arena_bytes
from runtime.cuda.stream import Stream
from runtime.errors import CudaError, DeviceLost, EngineBug, OutOfDeviceMemory, PinningFailed
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver


def test_bytes_go_up_and_come_down(device: Device) -> None:
    source = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    with (
        Stream(device) as stream,
        PinnedBuffer(device, len(source)) as host,
        DeviceBuffer(device, len(source)) as buffer,
    ):
        assert not host.view.any()
        host.view[:] = source
        stream.upload(buffer.address, host.host, len(source))
        stream.fill(buffer.address + 100, 7, 50)
        host_after = PinnedBuffer(device, len(source))
        with host_after:
            stream.download(host_after.host, buffer.address, len(source))
            stream.synchronize()
            expected = source.copy()
            expected[100:150] = 7
            np.testing.assert_array_equal(host_after.view, expected)


@pytest.mark.parametrize("n_copies", [1, 2, 9])
def test_many_copies_go_up_together(device: Device, n_copies: int) -> None:
    n_bytes, whole = 1000, 1000 * n_copies
    with (
        Stream(device) as stream,
        PinnedBuffer(device, whole) as host,
        PinnedBuffer(device, whole) as back,
        DeviceBuffer(device, whole) as buffer,
    ):
        host.view[:] = np.random.default_rng(2).integers(0, 256, whole, np.uint8)
        order = np.random.default_rng(3).permutation(n_copies)
        copies = [
            (buffer.address + n_bytes * int(to), host.host + n_bytes * n, n_bytes)
            for n, to in enumerate(order)
        ]
        stream.fill(buffer.address, 7, whole)  # before them
        CopyBatch(stream, 4).upload(copies)
        stream.fill(buffer.address, 9, 3)  # behind them
        stream.download(back.host, buffer.address, whole)
        stream.synchronize()
        expected = np.empty((n_copies, n_bytes), np.uint8)
        expected[order] = host.view.reshape(n_copies, n_bytes)
        expected[0, :3] = 9
        np.testing.assert_array_equal(back.view, expected.reshape(-1))


@pytest.mark.parametrize(("version", "n_calls"), [(13000, 1), (12060, 0)])
def test_many_copies_are_one_call_where_the_driver_has_it(version: int, n_calls: int) -> None:
    fake = FakeDriver(version=version)
    with (
        Device(initialized(fake, "12.9.0")) as device,
        Stream(device) as stream,
        PinnedBuffer(device, 64) as host,
        DeviceBuffer(device, 64) as buffer,
    ):
        CopyBatch(stream).upload([(buffer.address + at, host.host + at, 8) for at in (0, 16, 40)])
    assert fake.calls["cuMemcpyBatchAsync"] == n_calls
    assert fake.calls["cuMemcpyHtoDAsync"] == (0 if n_calls else 3)


def test_a_driver_that_takes_no_batch_gets_the_copies_one_by_one() -> None:
    fake = FakeDriver()
    fake.fail["cuMemcpyBatchAsync"] = CUresult["CUDA_ERROR_INVALID_VALUE"]
    with (
        Device(initialized(fake, "13.4.4")) as device,
        Stream(device) as stream,
        Stream(device) as another,
        PinnedBuffer(device, 64) as host,
        PinnedBuffer(device, 64) as back,
        DeviceBuffer(device, 64) as buffer,
    ):
        host.view[:] = np.arange(64)
        told: list[str] = []
        batch = CopyBatch(stream, tell=told.append)
        for _ in range(2):
            batch.upload([(buffer.address + at, host.host + at, 32) for at in (0, 32)])
        assert len(told) == 1 and "CUDA_ERROR_INVALID_VALUE" in told[0]
        stream.download(back.host, buffer.address, 64)
        stream.synchronize()
        np.testing.assert_array_equal(back.view, host.view)
        assert fake.calls["cuMemcpyBatchAsync"] == 1 and fake.calls["cuMemcpyHtoDAsync"] == 4
        fake.lost = CUresult["CUDA_ERROR_ILLEGAL_ADDRESS"]
        with pytest.raises(DeviceLost):
            CopyBatch(another).upload(
                [(buffer.address, host.host, 4), (buffer.address, host.host, 4)]
            )
        assert fake.calls["cuMemcpyBatchAsync"] == 2 and fake.calls["cuMemcpyHtoDAsync"] == 4
        fake.lost = None


def test_too_much_is_refused_with_what_was_asked_and_what_is_free(device: Device) -> None:
    asked = device.info.memory_bytes + (1 << 30)
    with pytest.raises(
        OutOfDeviceMemory, match=f"{asked} bytes asked for, .* bytes free"
    ) as caught:
        DeviceBuffer(device, asked)
    assert caught.value.asked == asked
    assert caught.value.free is not None
    assert 0 < caught.value.free <= device.info.memory_bytes


def test_closing_twice_is_one_release_and_use_afterwards_is_a_bug(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    with Device(fake_driver) as device:
        buffer = DeviceBuffer(device, 64, "keys")
        buffer.close()
        buffer.close()
        assert fake.calls["cuMemFree"] == 1
        with pytest.raises(EngineBug, match=r"'keys'.*after it was closed"):
            _ = buffer.address


def test_a_mapped_file_is_pinned_where_it_lies(device: Device, tmp_path: Path) -> None:
    if not device.info.registers_read_only:
        pytest.skip("this GPU cannot register read-only maps")
    path = tmp_path / "weights"
    content = np.arange(8192, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        view = np.frombuffer(pages, np.uint8)
        with (
            RegisteredMemory(device, view, read_only=True) as host,
            DeviceBuffer(device, len(view)) as buffer,
            PinnedBuffer(device, len(view)) as back,
            Stream(device) as stream,
        ):
            stream.upload(buffer.address, host.host, len(view))
            stream.download(back.host, buffer.address, len(view))
            stream.synchronize()
            np.testing.assert_array_equal(back.view, content)
        del host, view


def test_pinning_that_fails_says_how_to_raise_the_limit(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    fake.fail["cuMemHostRegister"] = CUresult["CUDA_ERROR_OUT_OF_MEMORY"]
    with Device(fake_driver) as device:
        with pytest.raises(PinningFailed, match=r"4096 bytes.*ulimit -l"):
            PinnedBuffer(device, 4096)
        assert device.open_resources == ()


def test_pinned_memory_that_kernels_cannot_address_is_given_back(
    fake: FakeDriver, fake_driver: Driver
) -> None:
    fake.fail["cuMemHostGetDevicePointer"] = CUresult["CUDA_ERROR_INVALID_VALUE"]
    with Device(fake_driver) as device:
        with PinnedBuffer(device, 4096) as pinned, pytest.raises(CudaError):
            _ = pinned.address
        assert device.open_resources == ()
        assert fake.live == {"context": 1}


def test_only_contiguous_memory_is_registered(device: Device) -> None:
    with pytest.raises(EngineBug, match="contiguous"):
        RegisteredMemory(device, np.zeros((8, 8))[:, 0])


def test_more_host_memory_than_can_be_mapped_is_the_same_error(device: Device) -> None:
    with pytest.raises(PinningFailed):
        PinnedBuffer(device, 1 << 62)


def test_large_pinned_memory_is_zero_and_stays_readable(device: Device) -> None:
    with PinnedBuffer(device, (64 << 20) + 5) as host:
        view = host.view
        assert not view[:: 1 << 16].any()
        view[-1] = 3
    assert view[-1] == 3


def test_an_arena_is_one_allocation_with_slots_of_each_size(device: Device) -> None:
    counts = {1000: 2, 300: 3}
    with Arena(device, counts) as arena:
        assert arena.nbytes == arena_bytes(counts) == 2 * 1024 + 3 * 512
        small = [arena.take(300) for _ in range(3)]
        large = [arena.take(513), arena.take(1024)]
        slots = [slot for slot in (*small, *large) if slot is not None]
        assert sorted(slot.index for slot in slots) == [0, 1, 2, 3, 4]
        spans = sorted((slot.address, slot.address + slot.nbytes) for slot in slots)
        assert spans[0][0] == arena.address
        assert spans[-1][1] == arena.address + arena.nbytes
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert arena.take(1) is None, "a larger slot must not be used up for a small one"
        assert arena.take(1024) is None


def test_a_slot_comes_back_once(device: Device) -> None:
    with Arena(device, {256: 1}) as arena:
        slot = arena.take(100)
        assert slot is not None
        arena.give(slot)
        with pytest.raises(EngineBug, match="not taken"):
            arena.give(slot)
        assert arena.take(100) == slot
        with pytest.raises(EngineBug, match="no slot of 257 bytes"):
            arena.take(257)
        assert "1 of 1 slots taken" in str(arena)
