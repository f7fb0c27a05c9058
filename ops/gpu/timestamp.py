"""The GPU kernel `timestamp`: when the kernel before it had ended, by the GPU's own clock.

target  address of a u64 in device memory, which gets nanoseconds

Only graphs that are captured for profiling hold it, between kernels of different parts of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines

BLOCK = 1
STAMP_BYTES = 8


def timestamp(*, overlapped: bool = False) -> Kernel:
    """The time into one place; grid (1,)."""
    return Kernel(
        entry="timestamp",
        source="timestamp.ptx",
        defines=launch_defines(BLOCK, 1, overlapped),
        params=(("target", "u64"),),
        block=BLOCK,
        reference=timestamp_reference,
    )


def timestamp_reference(stamps: NDArray[np.uint64], index: int) -> NDArray[np.bool_]:
    """Which of u64[n] change: the one that is written."""
    changed: NDArray[np.bool_] = np.arange(len(stamps)) == index
    return changed


def variants() -> Iterator[tuple[str, Kernel]]:
    """Alone and overlapped."""
    yield "timestamp", timestamp()
    yield "timestamp (overlapped)", timestamp(overlapped=True)
