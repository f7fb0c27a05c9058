"""Tensors reach the GPU unchanged, by way of their file's pages or of a buffer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from runtime.cuda.memory import DeviceBuffer, RegisteredMemory
from runtime.engine.gpu import transfer
from runtime.engine.gpu.transfer import Refused, Transfer, transfer_all
from runtime.models.mapped_file import MappedFile
from tests.support.cuda_constants import CUresult
from tests.support.fake_driver import FakeDriver

PAGE = mmap.PAGESIZE
SPANS = ((0, 5), (7, 3 * PAGE), (4 * PAGE, 6 * PAGE), (11 * PAGE + 9, 20), (12 * PAGE, 0))
"""(first byte, bytes): too few, over the edges of pages, whole pages, inside one, nothing."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAPPED_BYTES", 2 * PAGE)
    monkeypatch.setattr(transfer, "STAGE_BYTES", 1000)
    monkeypatch.setattr(transfer, "LEAST_MAPPED_BYTES", 20)
    monkeypatch.setattr(transfer, "GAP_BYTES", PAGE - 10)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MappedFile]:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(2).integers(0, 256, 12 * PAGE, np.uint8).tobytes())
    mapped = MappedFile(path)
    mapped.map()
    yield mapped
    mapped.close()


def carried(device: Device, file: MappedFile, *, mapped: bool = True) -> bool:
    """Whether every span arrives, and nothing beside it."""
    with DeviceBuffer(device, 16 * PAGE) as buffer:
        whole: np.ndarray = device.driver.api._span(buffer.address, buffer.nbytes)
        expected, moved = whole.copy(), list[int]()
        transfers = []
        for first, n_bytes in SPANS:
            data = file.view(first, n_bytes)
            transfers.append(Transfer(buffer.address + first + 3, data, mapped))
            expected[first + 3 : first + 3 + n_bytes] = data
        transfer_all(device, transfers, moved.append)
        assert sum(moved) == sum(n_bytes for _, n_bytes in SPANS)
        return np.array_equal(whole, expected)


def registered_pages(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is registered of the file, from now on."""
    seen: list[tuple[int, int]] = []
    register = fake._cuMemHostRegister

    def watched(address: int, n_bytes: int, flags: int) -> None:
        if flags & fake.CU_MEMHOSTREGISTER_READ_ONLY:
            seen.append((address, n_bytes))
        register(address, n_bytes, flags)

    monkeypatch.setattr(fake, "_cuMemHostRegister", watched)
    return seen


def test_whole_pages_of_a_file_travel_without_a_copy(
    device: Device, file: MappedFile, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = registered_pages(fake, monkeypatch)
    assert carried(device, file)
    start = file.view(0, 1).ctypes.data
    assert {(address - start) // PAGE for address, _ in seen} == {0, 2, 4, 6, 8}
    assert all(address % PAGE == 0 and n_bytes <= 2 * PAGE for address, n_bytes in seen)


def test_tensors_near_each_other_are_registered_together(
    device: Device, file: MappedFile, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "GAP_BYTES", PAGE)
    monkeypatch.setattr(transfer, "MAPPED_BYTES", 16 * PAGE)
    seen = registered_pages(fake, monkeypatch)
    assert carried(device, file)
    assert [n_bytes for _, n_bytes in seen] == [10 * PAGE]


def test_many_small_tensors_share_a_buffer(
    device: Device, file: MappedFile, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_waits, synchronize = 0, fake._cuStreamSynchronize

    def counted(stream: object) -> None:
        nonlocal n_waits
        n_waits += 1
        synchronize(stream)

    monkeypatch.setattr(fake, "_cuStreamSynchronize", counted)
    with DeviceBuffer(device, 100 * PAGE) as buffer:
        small = [Transfer(buffer.address + PAGE * i, file.view(90 * i, 90)) for i in range(100)]
        transfer_all(device, small)
        whole: np.ndarray = device.driver.api._span(buffer.address, buffer.nbytes)
        assert all(np.array_equal(whole[PAGE * i :][:90], small[i].data) for i in range(100))
    assert n_waits == 9, "buffers of 1000 bytes"


def test_pages_that_another_has_registered_are_copied(device: Device, file: MappedFile) -> None:
    pages = file.view(5 * PAGE, 2 * PAGE)
    with RegisteredMemory(device, pages, "another's", read_only=True):
        assert carried(device, file)
        with DeviceBuffer(device, 16 * PAGE) as buffer:
            whole = Transfer(buffer.address, file.view(0, 12 * PAGE), mapped=True)
            refused = transfer_all(device, [whole])
    assert refused == Refused(4 * PAGE), "the pieces of two pages that hold one of them"
    with DeviceBuffer(device, 16 * PAGE) as buffer:
        again = Transfer(buffer.address, whole.data, mapped=True)
        assert transfer_all(device, [again]) == Refused()


def test_a_gpu_that_registers_no_files_gets_copies(
    file: MappedFile, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.attributes["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
    seen = registered_pages(fake, monkeypatch)
    with Device(initialized(fake, "13.4.4")) as poor:
        assert carried(poor, file)
    assert seen == []


def test_what_is_no_map_is_never_registered_as_one(
    device: Device, file: MappedFile, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = registered_pages(fake, monkeypatch)
    assert carried(device, file, mapped=False) and seen == []


def test_a_failed_copy_gives_everything_back(
    device: Device, file: MappedFile, fake: FakeDriver
) -> None:
    for call in ("cuMemcpyHtoDAsync", "cuMemcpyBatchAsync"):
        fake.fail[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(Exception, match="INVALID_VALUE"):
        carried(device, file)
    assert "registered" not in fake.live
