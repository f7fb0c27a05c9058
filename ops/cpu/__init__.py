"""The CPU kernels: Numba functions whose SIMD parts are emitted as LLVM IR.

Importing any module of this package first points Numba's on-disk cache at the default kernel
cache.  A program that wants it elsewhere calls `ops.cpu.cache.use_directory` before it imports
another module of this package.
"""

from __future__ import annotations

from ops.cpu.cache import use_directory

KERNEL_CACHE = use_directory()
