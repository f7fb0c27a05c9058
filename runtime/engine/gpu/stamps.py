"""Stamps: the GPU's clock in a captured graph, wherever one part of a step ends and another begins.

Only graphs of timed shapes have them; all others are captured as if this file were not there. A
stamp is a kernel of one thread. They lie in memory of their own, and `report` hands them to the
host with everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel
from ops.gpu.step_io import RING
from ops.gpu.timestamp import STAMP_BYTES, timestamp
from runtime.cuda.device import Device
from runtime.cuda.memory import DeviceBuffer, PinnedBuffer
from runtime.engine.gpu.launch_plan import Fork, Join, LaunchPlan, Mark, Node, PlannedLaunch
from runtime.errors import EngineBug
from runtime.profiling.record import Part

U64 = NDArray[np.uint64]

STAMPS_A_LAYER, OTHER_STAMPS = 80, 16
"""Four for each piece that a prompt fetches, up to 17 of a layer on average."""
ALIGN = 16
"""What `report` copies is a multiple."""

PART_OF_SOURCE = {
    "route.ptx": Part.ROUTER,
    "choose_experts.ptx": Part.ROUTER,
    "group.ptx": Part.ROUTER,
    "candidates.ptx": Part.LOGITS,
    "sample.ptx": Part.LOGITS,
    "hand_over.ptx": Part.HAND_OVER,
    "take_over.ptx": Part.HAND_OVER,
    "take_tokens.ptx": Part.LAUNCH,
    "refresh.ptx": Part.LAUNCH,
}
PART_OF_SIDE = {"mailbox.ptx": Part.MISSES, "fetch_experts.ptx": Part.UPLOADS}


@dataclass(frozen=True)
class Wait:
    """The main branch waits for a mailbox, from stamp `at` to the next one; the mailbox began about
    when stamp `since` was written."""

    since: int
    at: int


@dataclass
class StampLayout:
    """What the stamps of a graph mean.

    parts   of the time from stamp i of the main branch to the next one; stamps `places[i]`
    waits   of each MoE layer with a mailbox, in order
    beside  (part, stamp at its start, stamp at its end) of the side branch
    """

    parts: list[Part] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    beside: list[tuple[Part, int, int]] = field(default_factory=list)
    n_stamps: int = 0


class StampMemory:
    """Where the stamps of a GPU's graphs lie, and what of them the host sees."""

    def __init__(self, device: Device, n_layers: int) -> None:
        """Raises: OutOfDeviceMemory, PinningFailed, CudaError."""
        self.most = STAMPS_A_LAYER * n_layers + OTHER_STAMPS
        self.n_bytes = -(-STAMP_BYTES * self.most // ALIGN) * ALIGN
        self._buffer = DeviceBuffer(device, self.n_bytes, "stamps")
        try:
            self._pinned = PinnedBuffer(device, RING * self.n_bytes, "stamps")
        except BaseException:
            self._buffer.close()
            raise
        self.address, self.host_address = self._buffer.address, self._pinned.address
        self._views = self._pinned.view.view(np.uint64).reshape(RING, -1)

    def of(self, epoch: int) -> U64:
        """Those of step `epoch`, u64[most]; valid until `RING` steps later."""
        view: U64 = self._views[epoch % RING]
        return view

    def close(self) -> None:
        self._pinned.close()
        self._buffer.close()


def stamp_kernels(*, overlapped: bool) -> list[Kernel]:
    """What graphs with stamps need besides."""
    return [timestamp(), *([timestamp(overlapped=True)] if overlapped else [])]


def part_of(launch: PlannedLaunch) -> Part:
    """The part that a launch of the main branch belongs to."""
    known = PART_OF_SOURCE.get(launch.kernel.source)
    if known is not None:
        return known
    if launch.name == "logits":
        return Part.LOGITS
    kinds = launch.name.split(".")
    if "router" in kinds:
        return Part.ROUTER
    return Part.HITS if "experts" in kinds else Part.DENSE


def add_stamps(plan: LaunchPlan, address: int, most: int, *, overlapped: bool) -> StampLayout:
    """Put stamps into a plan, from its first launch to its last one, `report`.

    address  of u64[most]
    Raises: EngineBug where they are too few.
    """
    stamper = _Stamper(address, overlapped)
    for node in plan.nodes:
        stamper.take(node)
    if stamper.layout.n_stamps > most:
        raise EngineBug(f"{stamper.layout.n_stamps} stamps in a graph with room for {most}")
    plan.nodes[:] = stamper.nodes
    return stamper.layout


class _Stamper:
    """Takes the nodes of a plan in order; `nodes` are those with stamps between them."""

    def __init__(self, address: int, overlapped: bool) -> None:
        self.nodes: list[Node] = []
        self.layout = StampLayout()
        self._address, self._overlapped = address, overlapped
        self._part: Part | None = None  # of the main branch now
        self._forked: Part | None = None  # what is on the side branch
        self._since = 0  # the first main stamp since it began

    def take(self, node: Node) -> None:
        if isinstance(node, Fork):
            self._since = len(self.layout.parts)
            self.nodes.append(node)
        elif isinstance(node, Join):
            self._join(node)
        elif isinstance(node, Mark):
            self.nodes.append(node)
        elif node.side:
            self._beside(node)
        elif node.kernel.source == "report.ptx":
            self._stamp(early=self._part is not None)
            self.nodes.append(node)
        else:
            part = part_of(node)
            if part is not self._part:
                self._enter(part)
            self.nodes.append(node)

    def _enter(self, part: Part) -> None:
        """The main branch goes on with another part; behind a join it has no part yet."""
        self._stamp(early=self._part is not None)
        self.layout.parts.append(part)
        self._part = part

    def _join(self, node: Join) -> None:
        part = self._forked or (Part.EXCHANGE if node.number is None else Part.UPLOADS)
        self._enter(part)
        self.nodes.append(node)
        at = len(self.layout.parts) - 1
        if part is Part.MISSES:
            self.layout.waits.append(Wait(min(self._since, at), at))
        self._part = self._forked = None

    def _beside(self, node: PlannedLaunch) -> None:
        part = self._forked = PART_OF_SIDE.get(node.kernel.source, Part.EXCHANGE)
        if part is not Part.UPLOADS:  # a post must not wait for stamps
            self.nodes.append(node)
            return
        first = self._place(side=True)
        self.nodes.append(node)
        self.layout.beside.append((part, first, self._place(side=True)))

    def _stamp(self, *, early: bool) -> None:
        self.layout.places.append(self._place(early=early))

    def _place(self, *, side: bool = False, early: bool = False) -> int:
        """Add a stamp; its number."""
        index = self.layout.n_stamps
        overlapped = early and self._overlapped and not side
        self.nodes.append(
            PlannedLaunch(
                name=f"stamp.{index}",
                kernel=timestamp(overlapped=overlapped),
                grid=(1,),
                arguments={"target": self._address + STAMP_BYTES * index},
                shared_bytes=0,
                overlapped=overlapped,
                side=side,
            )
        )
        self.layout.n_stamps += 1
        return index
