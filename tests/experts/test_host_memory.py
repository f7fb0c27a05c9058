"""How much memory may be pinned: what the machine says, and its control groups."""

from __future__ import annotations

from pathlib import Path

from runtime.experts.host_memory import HostMemory, MemoryReading
from tests.support.machine_files import PAGE_BYTES, control_group, machine_files

GIB = 1 << 30


def test_the_machine_s_own_files_are_read() -> None:
    reading = HostMemory().read()
    assert reading is not None and 0 < reading.available <= reading.total


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert HostMemory(tmp_path).read() is None


def test_memory_and_swap(tmp_path: Path) -> None:
    machine_files(tmp_path, total=64 * GIB, available=40 * GIB, swapped=7)
    assert HostMemory(tmp_path).read() == MemoryReading(64 * GIB, 40 * GIB, 7 * PAGE_BYTES)


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """Pages of files are as good as free: the kernel drops them."""
    machine_files(tmp_path, total=64 * GIB, available=40 * GIB)
    top = tmp_path / "sys/fs/cgroup"
    control_group(top / "a/b", limit=None, used=5 * GIB, files=0)
    control_group(top / "a", limit=16 * GIB, used=12 * GIB, files=8 * GIB)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert HostMemory(tmp_path).read() == MemoryReading(16 * GIB, 12 * GIB, 0)
    control_group(top / "a/b", limit=6 * GIB, used=5 * GIB, files=0)
    assert HostMemory(tmp_path).read() == MemoryReading(6 * GIB, GIB, 0)


def test_a_container_s_own_group_is_the_top(tmp_path: Path) -> None:
    machine_files(tmp_path, total=64 * GIB, available=40 * GIB)
    control_group(tmp_path / "sys/fs/cgroup", limit=8 * GIB, used=9 * GIB, files=0)
    reading = HostMemory(tmp_path).read()
    assert reading == MemoryReading(8 * GIB, 0, 0) and reading.room(0) == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    machine_files(tmp_path, total=64 * GIB, available=40 * GIB)
    folder = tmp_path / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    assert HostMemory(tmp_path).read() == MemoryReading(10 * GIB, 6 * GIB, 0)
    (folder / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert HostMemory(tmp_path).read() == MemoryReading(64 * GIB, 40 * GIB, 0)


def test_a_margin_stays_with_the_system() -> None:
    large, small = (MemoryReading(n, n, 0) for n in (100 * GIB, 3 * GIB))
    assert large.margin == 10 * GIB and large.room(20 * GIB) == 70 * GIB
    assert MemoryReading(16 * GIB, 10 * GIB, 0).room(0) == 8 * GIB
    assert small.margin == 3 * GIB // 2
    assert large.room(95 * GIB) == 0
