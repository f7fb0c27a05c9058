"""What a result was measured on: enough to tell two machines apart, nothing private."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def machine() -> dict[str, object]:
    """CPU model, cores, memory, Python and the date, for the head of a result file."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((l.split(":")[1].strip() for l in cpuinfo.splitlines() if "model name" in l), "?")
    flags = next((l for l in cpuinfo.splitlines() if l.startswith("flags")), "").split()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512vbmi", "gfni", "amx_int8")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(total / 2**30, 1),
        "features": [flag for flag in wanted if flag in flags],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
