"""HostMemory: how much of the machine's memory may be taken for good, and whether it swaps.

Pinned pages of a file stay on the kernel's lists of what it may reclaim, so both MemAvailable and a
control group's figures go on counting them as free: whoever pins subtracts what it has pinned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MARGIN_SHARE = 0.1
MARGIN_BYTES = 2 << 30
"""Left to the system and to other processes: the larger of the two, at most half of the memory."""

PAGE_BYTES = 4096
UNLIMITED = 1 << 60
"""A limit from here on is none; control groups of version 1 write such numbers."""


@dataclass(frozen=True)
class MemoryReading:
    """total and available bytes, those of the tightest limit; bytes swapped out since the boot."""

    total: int
    available: int
    swapped_out: int

    @property
    def margin(self) -> int:
        """Bytes that stay with the system."""
        return min(max(MARGIN_BYTES, int(MARGIN_SHARE * self.total)), self.total // 2)

    def room(self, pinned: int) -> int:
        """Bytes that may still be pinned where so many are; not below 0."""
        return max(self.available - pinned - self.margin, 0)


class HostMemory:
    """root: where the kernel's files are found, /proc and /sys."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self) -> MemoryReading | None:
        """The state now; None where the system does not tell (it is not Linux)."""
        machine = _fields(self._root / "proc/meminfo")
        total, available = machine.get("MemTotal:"), machine.get("MemAvailable:")
        if total is None or available is None:
            return None
        total, available = 1024 * total, 1024 * available
        for limit, left in self._groups():
            total, available = min(total, limit), min(available, left)
        swapped = _fields(self._root / "proc/vmstat").get("pswpout", 0)
        return MemoryReading(total, max(available, 0), PAGE_BYTES * swapped)

    def _groups(self) -> list[tuple[int, int]]:
        """(limit, bytes left) of each control group that this process is in."""
        found = []
        for folder in self._folders("memory.max"):
            found.append(_limits(folder, "memory.max", "memory.current", ""))
        for folder in self._folders("memory/memory.limit_in_bytes"):
            part = folder / "memory"
            found.append(_limits(part, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
        return [pair for pair in found if pair is not None]

    def _folders(self, name: str) -> list[Path]:
        """The process's own control group and those above it, as far as they have that file."""
        top = self._root / "sys/fs/cgroup"
        lines = _text(self._root / "proc/self/cgroup").splitlines()
        own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
        folder, folders = top / own, [top]
        while folder != top and top in folder.parents:
            folders.append(folder)
            folder = folder.parent
        return [folder for folder in folders if (folder / name).exists()]


def _limits(folder: Path, limit: str, used: str, prefix: str) -> tuple[int, int] | None:
    """A group's limit and what is left of it, the pages of files that it may drop included."""
    words = [_text(folder / name).strip() for name in (limit, used)]
    if not all(word.isdigit() for word in words):
        return None  # "max"
    most, now = map(int, words)
    if most >= UNLIMITED:
        return None
    stat = _fields(folder / "memory.stat")
    files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return most, most - now + files


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number ...`."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """Of a file that need not be there."""
    try:
        return path.read_text()
    except OSError:
        return ""
