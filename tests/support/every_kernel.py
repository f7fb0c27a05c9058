"""Every GPU kernel in each of its formats."""

from __future__ import annotations

from collections.abc import Iterator

from ops.expert import GPU_FORMATS, RowLaunch, expert_down, expert_gate_up
from ops.kernel import Kernel
from ops.quantize import quantize
from ops.quants import FORMATS


def every_kernel() -> Iterator[Kernel]:
    """Built for 3 blocks a multiprocessor: with more the assembler may choose to spill."""
    launch = RowLaunch(16, min_blocks=3)
    for name in GPU_FORMATS:
        yield expert_gate_up(FORMATS[name], launch)
        yield expert_down(FORMATS[name], launch)
    yield quantize("q8_256")
    yield quantize("q8_32")


KERNELS = tuple(every_kernel())
