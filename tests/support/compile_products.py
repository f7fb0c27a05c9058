"""Compiles the CPU's matrix products for every format and instruction set, beside a long test run.

    python -m tests.support.compile_products

The tests of these kernels need them all, one and a half seconds each, when the second core has had
nothing to do for minutes. They come from the cache then; see tests/conftest.py.
"""

from __future__ import annotations

import os

LEAST_URGENT = 19


def main() -> None:
    """Compile what is not in the cache yet."""
    os.nice(LEAST_URGENT)
    from ops.cpu import KERNEL_CACHE
    from ops.cpu.formats import KERNEL_FORMATS
    from ops.cpu.isa import runnable_isas
    from ops.cpu.matmul import matmul_address

    if KERNEL_CACHE.reason:  # nobody else would find them
        return
    for name in KERNEL_FORMATS:
        for isa in runnable_isas():
            matmul_address(name, isa)


if __name__ == "__main__":
    main()
