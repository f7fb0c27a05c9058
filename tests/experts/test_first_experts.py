"""The first experts arrive, whether they are pinned, never will be, or are waited for in vain."""

from __future__ import annotations

import ctypes
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer
from runtime.experts import first_experts
from runtime.experts.cache import Upload
from runtime.experts.first_experts import load_first
from runtime.experts.host_experts import HostExperts
from runtime.experts.host_memory import HostMemory
from tests.support.machine_files import machine_files
from tests.support.moe_layers import MoeLayers


def check_loads(device: Device, layers: MoeLayers, host: HostExperts) -> None:
    """Every other expert gets a slot, and its bytes are there."""
    size = max(layer.slot_bytes for layer in host.layers)
    chosen = [(layer, expert) for layer in (0, 1) for expert in range(0, 6, 2)]
    uploads = [Upload(*expert, slot) for slot, expert in enumerate(chosen)]
    moved: list[int] = []
    with DeviceBuffer(device, size * len(uploads)) as slots:
        load_first(device, host, uploads, lambda n: slots.address + n * size, moved.append)
        for upload in uploads:
            spec, places = layers.specs[upload.layer], host.layers[upload.layer].matrices
            for linear, place in zip((*spec.gate_up, spec.down), places, strict=True):
                data = layers.weights[linear.weight].data[upload.expert].tobytes()
                at = slots.address + upload.slot * size + place.offset
                assert ctypes.string_at(at, len(data)) == data
    parts = [part for upload in uploads for part in host.parts(upload.layer, upload.expert)]
    assert sum(moved) == sum(n_bytes for _, _, n_bytes in parts)


def test_pinned_and_unpinned_experts_arrive(
    device: Device, layers: MoeLayers, tmp_path: Path
) -> None:
    host = HostExperts(layers.weights, layers.specs)
    check_loads(device, layers, host)
    uses = np.zeros((2, 8), np.uint64)
    uses[0, 4] = uses[1, 2] = 9
    memory = HostMemory(machine_files(tmp_path, total=600 << 10, available=600 << 10))
    host.pin(device, uses, memory=memory)
    assert 0 < host.pinned_experts.sum() < 14 and host.is_pinned(0, 4) and not host.is_pinned(0, 0)
    check_loads(device, layers, host)
    host.close()
    host.pin(device)
    assert host.pinned
    check_loads(device, layers, host)
    host.close()


def test_pinning_that_does_not_come_is_not_waited_for(
    device: Device, layers: MoeLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostExperts, "is_pinning", True)
    monkeypatch.setattr(first_experts, "PATIENCE_SECONDS", 0.0)
    check_loads(device, layers, HostExperts(layers.weights, layers.specs))


@pytest.mark.parametrize("pinned", [True, False])
def test_what_takes_too_long_is_left(
    device: Device, layers: MoeLayers, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones are there, batch by batch, until the time is over."""
    host = HostExperts(layers.weights, layers.specs)
    if pinned:
        host.pin(device)
    size = max(layer.slot_bytes for layer in host.layers)
    monkeypatch.setattr(first_experts, "BATCH_BYTES", 2 * host.layers[0].slot_bytes)
    clock = count()
    monkeypatch.setattr(first_experts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    uploads = [Upload(0, expert, slot) for slot, expert in enumerate((5, 3, 1, 0, 2))]
    moved: list[int] = []
    with DeviceBuffer(device, size * len(uploads)) as slots:
        place = lambda slot: slots.address + slot * size  # noqa: E731
        left = load_first(device, host, uploads, place, moved.append, 3)
        assert 0 < len(left) < 5 and left == uploads[len(uploads) - len(left) :]
        there = sum(n for up in uploads[: -len(left)] for _, _, n in host.parts(0, up.expert))
        assert sum(moved) == there
        assert load_first(device, host, uploads, place, moved.append, 0) == uploads
    host.close()


def test_nothing_to_load(device: Device, layers: MoeLayers) -> None:
    assert load_first(device, HostExperts(layers.weights, layers.specs), [], int, int) == []
