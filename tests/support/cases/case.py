"""A case: a kernel, its operands, what it gave and what it had to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel
from tests.support.machines import Machine

Array = NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """tolerance   largest difference allowed, absolute; 0: the same bits, any NaN equal to any"""

    result: Array
    expected: Array
    tolerance: float = 0.0

    @property
    def max_error(self) -> float:
        """Largest absolute difference; infinite where one of the two is not a number."""
        difference = np.abs(self.result.astype(np.float64) - self.expected.astype(np.float64))
        difference[self.result == self.expected] = 0
        difference[np.isnan(self.result) & np.isnan(self.expected)] = 0
        return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))

    @property
    def passed(self) -> bool:
        if self.tolerance:
            return self.max_error <= self.tolerance
        return same_bits(self.result, self.expected)


@dataclass(frozen=True)
class Case:
    """name    tells it apart from the kernel's other cases
    kernel  whose text it checks
    run     places the operands on a machine, launches, reads
    large   a real shape: for GPUs only
    """

    name: str
    kernel: Kernel
    run: Callable[[Machine], Outcome]
    large: bool = False


def same_bits(result: Array, expected: Array) -> bool:
    """Equal shapes, types and bits; any NaN equals any other."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype.kind != "f":
        return bool(np.array_equal(result, expected))
    equal = result.view(f"u{result.itemsize}") == expected.view(f"u{expected.itemsize}")
    return bool(np.all(equal | (np.isnan(result) & np.isnan(expected))))
