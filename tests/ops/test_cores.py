"""Which processors workers get on machines of different shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.cpu import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two processors each, numbered 0-3 and 4-7, without a quota."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores, "CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "_allowed", lambda: list(range(8)))
    return tmp_path


def test_workers_get_cores_first(machine: Path) -> None:
    assert cores.available_cores() == [0, 1, 2, 3]
    assert cores.default_threads() == 4
    assert cores.pin_to(3) == [0, 1, 2]
    assert cores.pin_to(6) == [0, 1, 2, 3, 4, 5]


def test_a_team_that_leaves_cores_to_others_floats(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two such processes would otherwise be pinned to the same processors."""
    assert cores.pin_to(1) is None
    assert cores.pin_to(2) is None
    monkeypatch.setattr(cores, "_allowed", lambda: [0, 1])
    assert cores.pin_to(1) is None, "half of a machine of two cores"


def test_workers_float_without_a_processor_for_the_event_loop(machine: Path) -> None:
    assert cores.pin_to(8) is None
    assert cores.pin_to(9) is None


def test_workers_float_under_a_quota(machine: Path) -> None:
    (machine / "cpu.max").write_text("250000 100000\n")
    assert cores.cpu_quota() == 2.5
    assert cores.default_threads() == 2
    assert cores.pin_to(4) is None
    (machine / "cpu.max").write_text("max 100000\n")
    assert cores.pin_to(4) == [0, 1, 2, 3]
