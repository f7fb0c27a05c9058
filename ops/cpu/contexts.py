"""Numba's contexts of the CPU, made before two threads can want them at once.

Who needs them first makes them: under the compiler's lock if it compiles, without it if it only
declares a function, and either waits for what the other one holds. Opening an engine does both
beside each other, and could wait for ever. Modules that use Numba import this one first.
"""

from __future__ import annotations

from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

with global_compiler_lock:
    TYPING, TARGET = cpu_target.typing_context, cpu_target.target_context
    """For declared and for compiled functions of the CPU."""
