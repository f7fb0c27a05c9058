"""Ledger: counts the memory that programs are made of, as it is taken or without taking it."""

from __future__ import annotations

import mmap
import weakref
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FROM_BYTES = 1 << 20
"""Larger arrays of a dry ledger are address space alone, whatever the machine has."""
NO_RESERVE = 0x4000
"""`mmap.MAP_NORESERVE`, which Python has from 3.13."""


class Ledger:
    """What `aligned` gives within its `with` block, as long as somebody holds it.

    dry  nothing is compiled, computed or read from a model meanwhile: the program cannot run
    """

    def __init__(self, *, dry: bool = False) -> None:
        self.dry = dry
        self._arrays: list[weakref.ref[NDArray[np.uint8]]] = []
        self._token: Token[Ledger | None] | None = None

    @property
    def n_bytes(self) -> int:
        """Of all arrays that are still held."""
        held = (array() for array in self._arrays)
        return sum(array.nbytes for array in held if array is not None)

    def zeros(self, n_bytes: int) -> NDArray[np.uint8]:
        """u8[n_bytes] that is counted."""
        if self.dry and n_bytes > FROM_BYTES:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            made: NDArray[Any] = np.frombuffer(mmap.mmap(-1, n_bytes, flags), np.uint8)
        else:
            made = np.zeros(n_bytes, np.uint8)
        self._arrays.append(weakref.ref(made))
        return made

    def __enter__(self) -> Self:
        self._token = _OPEN.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _OPEN.reset(self._token)


_OPEN: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def zeros(n_bytes: int) -> NDArray[np.uint8]:
    """u8[n_bytes], counted where a ledger is open; pages are untouched."""
    ledger = _OPEN.get()
    return np.zeros(n_bytes, np.uint8) if ledger is None else ledger.zeros(n_bytes)


def is_dry() -> bool:
    """Whether what is made now is only counted."""
    ledger = _OPEN.get()
    return ledger is not None and ledger.dry
