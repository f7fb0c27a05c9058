"""The machine, as far as results name it."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's marketing name, as /proc/cpuinfo has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """RAM that a model may take, or None where the system does not say."""
    from runtime.experts.host_memory import HostMemory

    reading = HostMemory().read()
    return None if reading is None else reading.available
