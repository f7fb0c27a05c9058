"""PinnedPages: which stretches of host memory are registered, and what lies wholly in them.

One thread adds, any thread asks: every answer comes from an arrangement that is never changed.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.errors import EngineBug

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Span = tuple[int, int]
"""[start, end), addresses."""


@dataclass(frozen=True)
class _Arrangement:
    """starts, ends of each registration, in order; joined: of those that touch, together."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    joined_starts: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    joined_ends: I64 = field(default_factory=lambda: np.zeros(0, np.int64))


class PinnedPages:
    """Registrations do not overlap, but may touch."""

    def __init__(self) -> None:
        self._now = _Arrangement()

    def add(self, spans: Iterable[Span]) -> None:
        """These are registered from now on."""
        pairs = sorted([*zip(self._now.starts, self._now.ends, strict=True), *spans])
        joined = join_touching(pairs)
        edges = np.array(joined, np.int64).reshape(-1, 2)
        starts, ends = [start for start, _ in pairs], [end for _, end in pairs]
        self._now = _Arrangement(starts, ends, edges[:, 0].copy(), edges[:, 1].copy())

    def clear(self) -> None:
        """Nothing is registered any more."""
        self._now = _Arrangement()

    @property
    def n_bytes(self) -> int:
        now = self._now
        return int((now.joined_ends - now.joined_starts).sum())

    def cover(self, starts: I64, ends: I64) -> Bools:
        """Whether all bytes of each [start, end) are registered; any shape."""
        now = self._now
        if not len(now.joined_starts):
            return np.zeros(starts.shape, np.bool_)
        at = np.searchsorted(now.joined_starts, starts, "right") - 1
        covered: Bools = (at >= 0) & (ends <= now.joined_ends[at])
        return covered

    def undivided(self, starts: I64, ends: I64) -> Bools:
        """Whether each [start, end) lies in one registration; any shape."""
        now = self._now
        if not now.starts:
            return np.zeros(starts.shape, np.bool_)
        at = np.searchsorted(np.array(now.starts, np.int64), starts, "right") - 1
        undivided: Bools = (at >= 0) & (ends <= np.array(now.ends, np.int64)[at])
        return undivided

    def cut(self, start: int, n_bytes: int) -> list[tuple[int, int]]:
        """(address, bytes) of copies that together read n_bytes at `start`: the driver refuses one
        that reads two registrations.

        Raises: EngineBug for bytes that are not all registered.
        """
        now, parts = self._now, []
        at = bisect_right(now.starts, start) - 1
        while n_bytes:
            if not 0 <= at < len(now.starts) or not now.starts[at] <= start < now.ends[at]:
                raise EngineBug(f"a copy of host memory at {start:#x}, which is not pinned")
            part = min(n_bytes, now.ends[at] - start)
            parts.append((start, part))
            start, n_bytes, at = start + part, n_bytes - part, at + 1
        return parts


def join_touching(spans: Iterable[Span]) -> list[Span]:
    """Spans in order, those together that overlap or touch."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def cut_spans(spans: Iterable[Span], most: int) -> list[Span]:
    """The same bytes in pieces of at most `most`."""
    return [(at, min(at + most, end)) for start, end in spans for at in range(start, end, most)]


def bytes_at(address: int, n_bytes: int) -> NDArray[np.uint8]:
    """Memory that belongs to someone else, as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
