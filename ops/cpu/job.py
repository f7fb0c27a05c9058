"""JobKernel: a job's function, compiled to a C function when its address is first asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from ops.cpu.ledger import is_dry
from ops.cpu.memory import array
from ops.cpu.program import aligned

SIGNATURE = types.void(types.int64, types.int64, types.int64)
"""void job(int64 args, int64 chunk, int64 worker)"""

kernel_njit = njit(error_model="numpy")
"""Decorator of the functions inside jobs: x / 0 is IEEE's, as nobody could catch an exception."""


class JobKernel:
    """One job function; `address` compiles it, or loads it from the cache, once."""

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self.name, self.module = function.__name__, function.__module__
        self._function = function
        self._compiled: object = None

    def compile(self) -> None:
        """Compile the function, or load it from the cache, unless that was done."""
        if self._compiled is None:
            compile_c = cfunc(SIGNATURE, cache=True, error_model="numpy")
            self._compiled = compile_c(self._function)

    @property
    def address(self) -> int:
        """Of the compiled function; 0 where memory is only counted."""
        if is_dry():
            return 0
        self.compile()
        return int(self._compiled.address)  # type: ignore[attr-defined]


def job_kernel(function: Callable[[int, int, int], None]) -> JobKernel:
    """Decorate `f(args, chunk, worker)`, written for Numba, as a job."""
    return JobKernel(function)


def args_record(name: str, **fields: str) -> np.dtype[np.void]:
    """A record of job arguments: field name -> "i8", "f4", ... ; addresses are i8."""
    return np.dtype(list(fields.items()), align=True, metadata={"name": name})


def record(dtype: np.dtype[Any], **values: Any) -> NDArray[Any]:
    """One record of job arguments; fields without a value are 0."""
    made = aligned(1, dtype)
    for name, value in values.items():
        made[name] = value
    return made


CTYPES = {"i8": ctypes.c_int64, "f8": ctypes.c_double}


def live(made: NDArray[Any]) -> Any:
    """The fields of a record of int64 and f64 as attributes of one object: to read or to change
    one takes a fraction of what it does by NumPy."""
    items = (made.dtype.fields or {}).items()
    fields = [(name, CTYPES[dtype.str[1:]]) for name, (dtype, *_) in items]
    structure: Any = type("Fields", (ctypes.Structure,), {"_fields_": fields})
    return structure.from_buffer(made)


@kernel_njit
def clear(address, n_bytes):
    """Zero bytes, a multiple of 4."""
    words = array(address, n_bytes // 4, np.int32)
    for i in range(n_bytes // 4):
        words[i] = 0
