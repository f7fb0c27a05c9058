"""What threads that wait count: cycles, and pauses before they offer their core to others."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

YIELD_AFTER = 1_000  # pauses (about 40 us) in one wait before the core is offered to others
YIELD_EVERY = 32  # pauses from then on: an offer takes longer than a hand-over should


@intrinsic
def cycle_counter(_: Any) -> tuple[Any, Any]:
    """cycle_counter() -> int64, the time-stamp counter (or the nearest thing the machine has)."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(64), [])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, function_type, "llvm.readcyclecounter"),
            [],
        )

    return types.int64(), codegen
