"""An interpreter of PTX text for tests: every thread's registers, in NumPy, with a sanitizer.

`load(text)` parses a module; `Module[name].launch(memory, grid, block, args)` runs a kernel. It
raises where a kernel reads what was never written, leaves its memory, misaligns, races in shared
memory or waits in vain, and it counts which instructions ran. It has no timing and no weak memory:
every store is seen at once, so a missing fence goes unnoticed.
"""

from __future__ import annotations

from tests.support.ptx.errors import (
    Deadlock,
    MemoryFault,
    PtxError,
    Race,
    UninitialisedRead,
    UnknownInstruction,
)
from tests.support.ptx.kernel import Kernel, load
from tests.support.ptx.memory import Memory
from tests.support.ptx.mutate import Mutation, mutations

__all__ = [
    "Deadlock",
    "Kernel",
    "Memory",
    "MemoryFault",
    "Mutation",
    "PtxError",
    "Race",
    "UninitialisedRead",
    "UnknownInstruction",
    "load",
    "mutations",
]
