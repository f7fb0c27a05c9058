"""A case: a kernel, its operands, what it gave and what it had to give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel
from ops.quants.block import F32
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


def normal_of(rng: np.random.Generator) -> Callable[..., F32]:
    """What gives f32 of a shape, normally distributed."""
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


def given(m: Machine, array: Array | None, there: object = True) -> int:
    """The place of an input, or 0 for one that is not there."""
    return m.place(array, writable=False) if array is not None and there else 0


def joined_bytes(parts: Iterable[Array]) -> Array:
    """The bytes of arrays one after another, one NaN for every NaN."""
    alike = [
        np.where(np.isnan(p), np.float32(np.nan), p) if p.dtype.kind == "f" else p for p in parts
    ]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in alike])


def same_bits(result: Array, expected: Array) -> bool:
    """Equal shapes, types and bits; any NaN equals any other."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.dtype.kind != "f":
        return bool(np.array_equal(result, expected))
    equal = result.view(f"u{result.itemsize}") == expected.view(f"u{expected.itemsize}")
    return bool(np.all(equal | (np.isnan(result) & np.isnan(expected))))
