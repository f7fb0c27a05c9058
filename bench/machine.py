"""What a result was measured on: enough to tell two machines apart, nothing private."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def machine() -> dict[str, object]:
    """CPU model, cores, memory, Python and the date, for the head of a result file."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if "model name" in x), "?")
    flags = next((x for x in lines if x.startswith("flags")), "").split()
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
