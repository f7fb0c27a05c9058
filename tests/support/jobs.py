"""Run one compiled job kernel on the calling thread."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.cpu.job import JobKernel
from ops.cpu.program import address_of, aligned

_C_JOB = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def job_args(dtype: np.dtype[Any], **values: Any) -> NDArray[Any]:
    """One record of arguments; an array stands for its address, fields without a value are 0."""
    made = aligned(1, dtype)
    for name, value in values.items():
        made[name] = address_of(value) if isinstance(value, np.ndarray) else value
    return made


def run_job(kernel: JobKernel, args: NDArray[Any], n_chunks: int) -> None:
    """All chunks of a job, the last first: their order must not matter."""
    function = _C_JOB(kernel.address)
    for chunk in reversed(range(n_chunks)):
        function(address_of(args), chunk, 0)
