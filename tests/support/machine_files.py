"""The kernel's files about memory, as a machine would show them."""

from __future__ import annotations

from pathlib import Path

PAGE_BYTES = 4096


def machine_files(root: Path, *, total: int, available: int, swapped: int = 0) -> Path:
    """Write /proc/meminfo and /proc/vmstat below `root`; bytes, and pages written to swap."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:  {total // 1024} kB\nMemFree:  1 kB\nMemAvailable:  {available // 1024} kB\n"
    )
    (root / "proc/vmstat").write_text(f"pswpin 5\npswpout {swapped}\n")
    return root


def control_group(folder: Path, *, limit: int | None, used: int, files: int) -> None:
    """A group of version 2: bytes, of which `files` are pages of files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon {used - files}\nfile {files}\ninactive_file {files // 4}\nactive_file "
    (folder / "memory.stat").write_text(f"{stat}{files - files // 4}\n")
