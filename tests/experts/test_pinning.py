"""Experts are pinned in the background, the most used first, as far as memory allows."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from runtime.cuda.device import Device
from runtime.cuda.driver import initialized
from runtime.errors import EngineBug
from runtime.experts import pinning
from runtime.experts.host_experts import HostExperts
from runtime.experts.host_memory import HostMemory
from runtime.experts.pinned_pages import PinnedPages
from runtime.experts.pinning import pieces
from tests.support.fake_driver import FakeDriver
from tests.support.machine_files import machine_files
from tests.support.moe_layers import MoeLayers

PAGE = mmap.PAGESIZE
PLENTY = 1 << 40


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages each, and the memory is looked at after each."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(pinning, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(pinning, "PUBLISH_SECONDS", 0.0)


def test_what_is_pinned_is_found_and_cut_where_registrations_end() -> None:
    pages = PinnedPages()
    starts, ends = np.array([0, 10, 95, 200]), np.array([10, 100, 120, 201])
    assert not pages.cover(starts, ends).any()
    pages.add([(50, 100), (0, 50)])
    pages.add([(200, 300)])
    assert pages.cover(starts, ends).tolist() == [True, True, False, True]
    assert pages.n_bytes == 200
    assert pages.cut(10, 30) == [(10, 30)]
    assert pages.cut(40, 60) == [(40, 10), (50, 50)]
    starts, ends = np.array([10, 40, 50, 150]), np.array([40, 51, 100, 160])
    assert pages.undivided(starts, ends).tolist() == [True, False, True, False]
    for start, n_bytes in ((90, 20), (150, 1), (300, 1)):
        with pytest.raises(EngineBug, match="not pinned"):
            pages.cut(start, n_bytes)
    pages.clear()
    assert pages.n_bytes == 0


def test_pieces_are_whole_pages_without_overlap_the_hottest_first(small_pieces: None) -> None:
    size = 3 * PAGE // 2  # neighbours share a page
    starts = (10 * PAGE + np.arange(12) * size).reshape(4, 3)
    ends = starts + size
    found = pieces(starts, ends, np.array([1.0, 0.0, 9.0, 0.0]), PLENTY)
    assert sorted(found)[0][0] == 10 * PAGE and max(b for _, b in found) == 28 * PAGE
    assert all(a % PAGE == 0 and 0 < b - a <= 2 * PAGE for a, b in found)
    assert all(a[1] == b[0] for a, b in zip(sorted(found), sorted(found)[1:], strict=False))
    first, last = found[0], found[-1]
    assert starts[2, 0] <= first[0] and first[1] <= ends[2, 2]
    assert not starts[0, 0] <= last[0] < ends[0, 2]
    assert pieces(starts[:0], ends[:0], np.zeros(0), PLENTY) == []


def test_where_memory_is_short_the_most_used_experts_are_pinned(small_pieces: None) -> None:
    starts = (PAGE * 100 * np.arange(1, 13)).reshape(4, 3)
    ends = starts + 5 * PAGE + 8
    heat = np.array([1.0, 50.0, 2.0, 7.0])
    found = pieces(starts, ends, heat, 45 * PAGE)  # two experts of 15 pages and a little
    pinned = PinnedPages()
    pinned.add(found)
    assert pinned.cover(starts, ends).all(axis=1).tolist() == [False, True, False, True]
    assert pinned.n_bytes <= 45 * PAGE


def test_all_experts_become_pinned_and_the_most_used_are_first(
    device: Device, layers: MoeLayers, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostExperts(layers.weights, layers.specs)
    uses = np.zeros((2, 8), np.uint64)
    uses[0, 5] = 1000
    seen: list[np.ndarray] = []
    publish = HostExperts._publish

    def watched(self: HostExperts, spans: list[tuple[int, int]]) -> None:
        publish(self, spans)
        seen.append(self.pinned_experts)

    monkeypatch.setattr(HostExperts, "_publish", watched)
    host.pin(device, uses)
    assert host.pinned and host.pins_all and host.why_not_pinned is None
    assert (
        host.pinned_experts[0].all() and host.pinned_experts[1].tolist() == [True] * 6 + [False] * 2
    ), "the second layer has six experts"
    first = next(array for array in seen if array.any())
    assert first[0, 5] and first.sum() <= 3, "neighbours share its pages at most"
    assert "GiB, " in str(host.describe()["expert_pinned"])
    for layer, expert in ((0, 0), (0, 5), (1, 5)):
        copied = bytearray(host.layers[layer].slot_bytes)
        for offset, address, n_bytes in host.copies(layer, expert):
            copied[offset : offset + n_bytes] = ctypes.string_at(address, n_bytes)
        for matrix in host.layers[layer].matrices:
            data = ctypes.string_at(matrix.host + expert * matrix.stride, matrix.n_bytes)
            assert copied[matrix.offset :][: matrix.n_bytes] == data
    assert len(host.copies(0, 0)) > 3, "an expert is larger than a piece"
    part = host.part(slice(1, 2))
    assert part.is_pinned(0, 5) and part.copies(0, 5) == host.copies(1, 5)
    assert part.pinned_experts is part.pinned_experts
    host.close()
    assert not host.pinned_experts.any() and host.why_not_pinned == "closed"


def test_pages_that_come_from_a_disk_are_asked_for_ahead(
    device: Device, layers: MoeLayers, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece once, a few ahead; none where the file is in memory."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pinning, "want_pages", lambda start, n: asked.append((start, start + n)))
    for rate, all_asked in ((0.0, False), (float("inf"), True)):
        monkeypatch.setattr(pinning, "SLOW_RATE", rate)
        host = HostExperts(layers.weights, layers.specs)
        host.pin(device)
        assert host._pinning is not None
        spans = [(piece.host, piece.host + piece.nbytes) for piece in host._pinning._pieces]
        assert asked == (spans[2:] if all_asked else [])
        host.close()


def test_steps_go_on_while_experts_are_pinned(
    device: Device,
    layers: MoeLayers,
    small_pieces: None,
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is stopped in the middle: what it has registered is usable, nothing else is."""
    host, go = HostExperts(layers.weights, layers.specs), threading.Event()
    register, n = fake._cuMemHostRegister, 0

    def slow(*arguments: int) -> None:
        nonlocal n
        n += 1
        if n == 40:
            fake._lock.release()  # the real driver lets others in
            go.wait()
            fake._lock.acquire()
        register(*arguments)

    monkeypatch.setattr(fake, "_cuMemHostRegister", slow)
    host.pin(device, np.arange(16).reshape(2, 8), wait=0.0)
    while n < 40:
        pass
    assert not host.pinned and host.pins_all and host.why_not_pinned is None
    assert 0 < host.pinned_experts.sum() < 14
    assert "so far" in str(host.describe()["expert_pinned"])
    layer, expert = np.argwhere(~host.pinned_experts)[0].tolist()
    with pytest.raises(EngineBug, match="not pinned"):
        host.copies(layer, expert)
    go.set()
    assert host._pinning is not None and host._pinning.wait(10.0)
    assert host.pinned
    host.close()


def test_closing_in_the_middle_gives_everything_back(
    device: Device, layers: MoeLayers, small_pieces: None, fake: FakeDriver
) -> None:
    host = HostExperts(layers.weights, layers.specs)
    host.pin(device, wait=0.0)
    host.close()
    assert "registered" not in fake.live


@pytest.mark.parametrize("nth", [0, 40])
def test_a_refused_piece_ends_it_and_says_so(
    device: Device, layers: MoeLayers, small_pieces: None, fake: FakeDriver, nth: int
) -> None:
    host, told = HostExperts(layers.weights, layers.specs), list[str]()
    fake.out_of_memory_at = fake.n_allocating + nth
    host.pin(device, np.arange(16).reshape(2, 8), tell=told.append)
    assert not host.pinned and not host.pins_all
    assert "cannot pin" in str(host.why_not_pinned) and len(told) == 1 and "cannot pin" in told[0]
    assert host.pinned_experts.any() == (nth > 0), "what is registered stays usable"
    host.close()


def test_a_gpu_that_cannot_register_is_named(
    device: Device, layers: MoeLayers, fake: FakeDriver
) -> None:
    fake.attributes["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
    told: list[str] = []
    with Device(initialized(fake, "13.4.4")) as poor:
        host = HostExperts(layers.weights, layers.specs)
        host.pin(poor, tell=told.append)
    assert told == [host.why_not_pinned] and "cannot read" in told[0]


def test_a_small_limit_pins_the_most_used_experts_only(
    device: Device, layers: MoeLayers, small_pieces: None, tmp_path: Path
) -> None:
    host, told = HostExperts(layers.weights, layers.specs), list[str]()
    uses = np.ones((2, 8), np.uint64)
    uses[0, 3] = uses[1, 2] = 90
    memory = HostMemory(machine_files(tmp_path, total=600 << 10, available=600 << 10))
    reading = memory.read()
    assert reading is not None and reading.room(0) == 300 << 10 < host.n_bytes
    host.pin(device, uses, memory=memory, tell=told.append)
    assert host.is_pinned(0, 3) and not host.pinned and not host.pins_all
    assert 0 < host.n_pinned_bytes <= 0.7 * (300 << 10)
    assert len(told) == 1 and "fit the free memory" in str(host.why_not_pinned)
    host.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"swapped": 1 << 20}, "began to swap"), ({"available": 1 << 20}, "are free")],
)
def test_it_stops_when_the_machine_runs_short(
    device: Device,
    layers: MoeLayers,
    small_pieces: None,
    tmp_path: Path,
    fake: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, int],
    words: str,
) -> None:
    facts = {"total": PLENTY, "available": PLENTY, "swapped": 100}
    memory = HostMemory(machine_files(tmp_path, **facts))
    register, n = fake._cuMemHostRegister, 0

    def watched(*arguments: int) -> None:
        nonlocal n
        n += 1
        if n == 4:
            machine_files(tmp_path, **{**facts, **change})
        register(*arguments)

    monkeypatch.setattr(fake, "_cuMemHostRegister", watched)
    host, told = HostExperts(layers.weights, layers.specs), list[str]()
    host.pin(device, memory=memory, tell=told.append)
    assert n == 4 and words in str(host.why_not_pinned) and words in told[0]
    assert host.n_pinned_bytes > 0 and not host.pins_all
    host.close()
