"""Which processors the worker team may use, and how many workers pay off."""

from __future__ import annotations

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> list[int]:
    """One processor number per physical core this process may run on, ascending."""
    allowed = _allowed()
    cores: dict[str, int] = {}
    for cpu in allowed:
        try:
            siblings = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    return sorted(cores.values())


def cpu_quota() -> float | None:
    """Processors the control group grants, None without a limit."""
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def default_threads() -> int:
    """One worker per physical core, no more than the control group's share."""
    quota = cpu_quota()
    n_cores = len(available_cores())
    return n_cores if quota is None else max(1, min(n_cores, int(quota)))


def pin_to(n_threads: int) -> list[int] | None:
    """A processor for each worker, or None where pinning would hurt.

    Only a team of several workers on all cores but at most one is pinned.  A smaller one leaves
    room for other processes, whose teams would be pinned to the same processors.  With a quota, or
    without a processor to spare for the event loop, workers float too: the one whose processor the
    loop takes between two steps can go on elsewhere.
    """
    cores, allowed = available_cores(), _allowed()
    quota = cpu_quota()
    if quota is not None and quota < len(cores):
        return None
    if n_threads == 1 or n_threads < len(cores) - 1:
        return None
    rest = [cpu for cpu in allowed if cpu not in cores]
    return (cores + rest)[:n_threads] if n_threads < len(allowed) else None


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
