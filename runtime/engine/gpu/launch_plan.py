"""LaunchPlan: the launches of a step in order, as data, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel
from runtime.cuda.memory import slot_bytes

Grid = tuple[int, ...]

UNKNOWN_ROOM = 1 << 40
"""Bytes of a room that is only measured."""


@dataclass(frozen=True)
class PlannedLaunch:
    """A kernel and everything its launch takes.

    name        what it is for, as in `3.qkv`
    overlapped  it waits for its predecessor itself
    side        it belongs to the branch beside the main one
    """

    name: str
    kernel: Kernel
    grid: Grid
    arguments: Mapping[str, float]
    shared_bytes: int
    overlapped: bool
    side: bool


@dataclass(frozen=True)
class Fork:
    """The side branch begins: it waits for what the main one has so far."""


@dataclass(frozen=True)
class Mark:
    """What the side branch has so far is to be known by a number, a small one."""

    number: int


@dataclass(frozen=True)
class Join:
    """The main branch waits for the side branch: all of it, or up to the last mark of a number."""

    number: int | None = None


Node = PlannedLaunch | Fork | Mark | Join


@dataclass
class LaunchPlan:
    """What a graph is captured from."""

    nodes: list[Node] = field(default_factory=list)
    _side: bool = False
    _joined: bool = False

    def add(
        self,
        name: str,
        kernel: Kernel,
        grid: Grid,
        arguments: Mapping[str, float],
        *,
        shared_bytes: int = 0,
        overlapped: bool = False,
    ) -> None:
        """Add a launch behind all others of its branch.

        Behind a join with a mark it never starts early on the main one. Behind one with all of the
        side branch it may: that has ended then, as none of it says before that others may start.
        """
        early = overlapped and (self._side or not self._joined)
        self._joined = self._joined and self._side
        self.nodes.append(
            PlannedLaunch(name, kernel, grid, arguments, shared_bytes, early, self._side)
        )

    @contextmanager
    def side_branch(self) -> Iterator[None]:
        """Launches added inside run beside those of the main branch until `join`."""
        self.nodes.append(Fork())
        self._side = True
        try:
            yield
        finally:
            self._side = False

    def mark(self, number: int) -> None:
        """Give what the side branch has so far a number, in the place of what had it before."""
        self.nodes.append(Mark(number))

    def join(self, number: int | None = None) -> None:
        """What is added from here on runs after the side branch, or what of it has the number."""
        self.nodes.append(Join(number))
        self._joined = number is not None

    @property
    def launches(self) -> list[PlannedLaunch]:
        return [node for node in self.nodes if isinstance(node, PlannedLaunch)]


class Room:
    """Places in one allocation, by name: asked for again, a place is the same.

    What a phase of a layer needs for itself alone may lie where another phase has what it needs:
    places of phases are taken from the end of the allocation, each phase's anew. No kernel may read
    such a place and write one of another phase, but the first that follows the whole phase may
    read it. A plan that is made without an allocation tells how much there has to be.
    """

    def __init__(self, base: int = 0, n_bytes: int = UNKNOWN_ROOM) -> None:
        self._base, self._end = base, base + n_bytes
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._sizes: dict[str, int] = {"": 0}

    @property
    def n_bytes(self) -> int:
        """All that was asked for."""
        phases = (size for phase, size in self._sizes.items() if phase)
        return self._sizes[""] + max(phases, default=0)

    def place(self, name: str, n_bytes: int, phase: str = "") -> int:
        """The address of so many bytes, aligned to 256; phase: whose they are alone."""
        key, size = (phase, name), self._sizes.setdefault(phase, 0)
        address, known = self._places.get(key, (0, n_bytes))
        if known < n_bytes:
            raise ValueError(f"{name} has {known} bytes, not {n_bytes}")
        if key not in self._places:
            self._sizes[phase] = size + slot_bytes(n_bytes)
            address = self._end - self._sizes[phase] if phase else self._base + size
            self._places[key] = (address, n_bytes)
        return address


class Constants:
    """Small read-only arrays that launches point to, in one allocation of the GPU."""

    def __init__(self, base: int = 0) -> None:
        self._base = base
        self._known: dict[bytes, int] = {}
        self._parts: list[bytes] = []
        self.n_bytes = 0

    def place(self, array: NDArray[Any]) -> int:
        """The address of the array's bytes, aligned to 256; equal ones lie there once."""
        content = array.tobytes()
        if content not in self._known:
            self._known[content] = self.n_bytes
            self._parts.append(content.ljust(slot_bytes(len(content)), b"\0"))
            self.n_bytes += len(self._parts[-1])
        return self._base + self._known[content]

    def image(self) -> NDArray[np.uint8]:
        """What has to lie there."""
        return np.frombuffer(b"".join(self._parts), np.uint8)
