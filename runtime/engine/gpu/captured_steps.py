"""CapturedSteps: the graph of every shape of step, captured when it is first needed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Protocol

import numpy as np

from ops.gpu.kernel import Kernel
from runtime.cuda.device import Device, DeviceInfo
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.stream import Event, Stream
from runtime.engine.gpu.control import ControlRing, ControlWriter
from runtime.engine.gpu.early_starts import early_starts
from runtime.engine.gpu.experts import I32, choices_shape
from runtime.engine.gpu.functions import Functions, KernelKey, key_of
from runtime.engine.gpu.graph_times import GraphTimes
from runtime.engine.gpu.launch_plan import (
    Constants,
    Fork,
    LaunchPlan,
    Mark,
    PlannedLaunch,
    Room,
)
from runtime.engine.gpu.plan_parts import PlanParts, StepMemory
from runtime.engine.gpu.slow_prompts import slow_launches
from runtime.engine.gpu.stamps import StampMemory, add_stamps, stamp_kernels
from runtime.engine.gpu.step_graph import StepPlanner
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.transfer import Transfer, transfer_all
from runtime.errors import DeviceUnavailable

NEWEST_SHARE = 0.2
"""Of the measured time of a step in the time that is expected of the next one."""
LONGEST_SHARE = 3.0
"""Of the expected time that counts of a step's."""

LEAST_CONSTANT_BYTES = 64 << 10
"""Of a graph's arrays."""


class Launchable(Protocol):
    """A `Graph`, or those of several GPUs."""

    def launch(self, stream: Any) -> None: ...


FULL_TOKENS = 2
"""From so many tokens on experts fill the GPU, so that a mailbox beside them would wait for room
until the most of them are done: measured 24 us late at 8 tokens, 100 us at 31."""


@dataclass
class CapturedStep:
    """A graph, where its steps are written, and the seconds that they took lately.

    choices_places  of each GPU: where the choices of its layers' experts begin among all, and their
                    shape, see `choices_shape`
    times           of each GPU: reads when the parts of a step began; none if they are not kept
    """

    shape: StepShape
    graph: Launchable
    writers: list[ControlWriter]
    n_launches: int
    choices_places: tuple[tuple[int, tuple[int, int, int]], ...]
    times: tuple[GraphTimes, ...] = ()
    seconds: float = 0.0

    def choices(self, results: I32) -> I32:
        """The experts that the step used, i32[n_moe_layers, tokens of the shape, n_used]."""
        parts = [
            results[at : at + size[0] * size[1] * size[2]].reshape(size)
            for at, size in self.choices_places
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def took(self, seconds: float) -> None:
        """A step ran for so long."""
        if not self.seconds:
            self.seconds = seconds
            return
        # One that a worker held up says nothing of the next, which is looked for in time.
        seconds = min(seconds, LONGEST_SHARE * self.seconds)
        self.seconds += NEWEST_SHARE * (seconds - self.seconds)


@dataclass
class Needs:
    """What plans of some shapes take: bytes of room and of control blocks, kernels.

    shared_bytes  of the block that takes most shared memory, and `largest_block`, what it is for
    slow_prompts  why prompts are read more slowly than those of other models
    """

    room_bytes: int = 0
    block_bytes: int = 0
    control_bytes: int = 0
    shared_bytes: int = 0
    largest_block: str = ""
    kernels: dict[KernelKey, Kernel] = field(default_factory=dict)
    slow_prompts: set[str] = field(default_factory=set)

    def check(self, gpu: DeviceInfo, cache_types: tuple[str, str]) -> None:
        """Raises: DeviceUnavailable where a block of a kernel does not fit a multiprocessor."""
        if self.shared_bytes > gpu.block_shared_bytes:
            name, (keys, values) = self.largest_block.split(".")[-1], cache_types
            less = "takes" if "f32" in cache_types else "may take"
            smaller = f"f16 for these {less} less, and " * (cache_types != ("f16", "f16"))
            raise DeviceUnavailable(
                f"{name} takes {self.shared_bytes >> 10} KiB of shared memory for this model with "
                f"cache_type_k {keys} and cache_type_v {values}, {gpu.name} has "
                f"{gpu.block_shared_bytes >> 10} KiB for a block: {smaller}device cpu takes any"
            )


def needs_of(planner: StepPlanner, shapes: list[StepShape]) -> Needs:
    """What all of these shapes need; nothing is allocated."""
    needs, layers = Needs(), planner.distinct_layers()
    for shape in shapes:
        room = Room()
        parts = planner.plan(shape, StepMemory(), room, Constants(), layers)
        needs.room_bytes = max(needs.room_bytes, room.n_bytes)
        needs.block_bytes = max(needs.block_bytes, parts.layout.block_bytes)
        needs.control_bytes = max(needs.control_bytes, parts.layout.n_bytes)
        needs.slow_prompts.update(slow_launches(shape, parts.plan.launches))
        for launch in parts.plan.launches:
            needs.kernels[key_of(launch.kernel)] = launch.kernel
            if launch.shared_bytes > needs.shared_bytes:
                needs.shared_bytes, needs.largest_block = launch.shared_bytes, launch.name
    return needs


class CapturedSteps:
    """Graphs by shape; all of them share the room and the ring."""

    def __init__(
        self,
        device: Device,
        planner: StepPlanner,
        functions: Functions,
        memory: StepMemory,
        ring: ControlRing,
        room: DeviceBuffer,
        first_choice: int | None = 0,
    ) -> None:
        """first_choice: where those of its layers begin among all; None: nobody wants them."""
        self._device, self._planner, self._functions = device, planner, functions
        self._memory, self._ring, self._room = memory, ring, room
        self._first_choice = first_choice
        self._steps: dict[StepShape, CapturedStep] = {}
        self._graphs: dict[StepShape, tuple[Graph, DeviceBuffer]] = {}
        self._stamps: StampMemory | None = None
        self._capturing = Lock()
        # What is captured runs in the stream that a graph is launched into, not in these.
        self._main = Stream(device, "capture")
        # First in line: the CPU waits for what the mailboxes post.
        self._side = Stream(device, "capture of a side branch", priority=-1)
        self._fork, self._join = Event(device, "fork"), Event(device, "join")
        self._marks: list[Event] = []
        self._constant_bytes = LEAST_CONSTANT_BYTES

    def __len__(self) -> int:
        return len(self._steps)

    def of(self, shape: StepShape) -> CapturedStep:
        """The graph of the shape, captured now if it is new: that takes 10 to 50 ms, on any thread.

        Raises: OutOfDeviceMemory, CudaError, DeviceLost.
        """
        with self._capturing:
            if shape not in self._steps:
                self._steps[shape] = self._capture(shape)
            return self._steps[shape]

    def is_captured(self, shape: StepShape) -> bool:
        """Whether `of` returns at once."""
        return shape in self._steps

    def all(self) -> list[CapturedStep]:
        """Those that were captured."""
        return list(self._steps.values())

    def drop(self, shapes: Iterable[StepShape]) -> None:
        """Give the graphs of these shapes back; no step is in flight."""
        with self._capturing:
            for shape in shapes:
                graph, constants = self._graphs.pop(shape)
                del self._steps[shape]
                graph.close()
                constants.close()

    def launches(self, shape: StepShape) -> list[tuple[PlannedLaunch, Launch]]:
        """The launches of a shape one by one, for timing; the shape must be captured."""
        self.of(shape)
        plan = self._plan(shape, Constants(self._graphs[shape][1].address))[0].plan
        return [(planned, self._launch(planned)) for planned in plan.launches]

    def close(self) -> None:
        with self._capturing:
            for graph, constants in self._graphs.values():
                graph.close()
                constants.close()
            self._graphs.clear()
            self._steps.clear()
            if self._stamps is not None:
                self._stamps.close()
        for resource in (*self._marks, self._fork, self._join, self._side, self._main):
            resource.close()

    def _plan(self, shape: StepShape, constants: Constants) -> tuple[PlanParts, GraphTimes | None]:
        """The launches, with stamps between them where the shape is timed, and who reads these."""
        room, planner = Room(self._room.address, self._room.nbytes), self._planner
        if not shape.timed:
            return planner.plan(shape, self._memory, room, constants), None
        stamps, overlapped = self._stamp_memory(), planner.overlapped
        memory = replace(
            self._memory,
            stamps=stamps.address,
            stamps_bytes=stamps.n_bytes,
            host_stamps=stamps.host_address,
        )
        parts = planner.plan(shape, memory, room, constants)
        layout = add_stamps(parts.plan, stamps.address, stamps.most, overlapped=overlapped)
        return parts, GraphTimes(layout, stamps, self._device.info.index)

    def _planned(
        self, shape: StepShape, made: ExitStack
    ) -> tuple[DeviceBuffer, Constants, tuple[PlanParts, GraphTimes | None]]:
        """The launches of a shape, and where their constants are to lie.

        Planning takes most of a capture's time, so it is done for room that sufficed so far, and
        again only where more is needed.
        """
        while True:
            with ExitStack() as trial:
                room = trial.enter_context(
                    DeviceBuffer(self._device, self._constant_bytes, "graph constants")
                )
                constants = Constants(room.address)
                planned = self._plan(shape, constants)
                if constants.n_bytes <= room.nbytes:
                    made.push(trial.pop_all())
                    return room, constants, planned
            self._constant_bytes = constants.n_bytes

    def _stamp_memory(self) -> StampMemory:
        """Taken when the first timed graph is captured, with the kernel that writes there."""
        if self._stamps is None:
            self._functions.load(stamp_kernels(overlapped=self._planner.overlapped))
            self._stamps = StampMemory(self._device, len(self._planner.model.spec.layers))
        return self._stamps

    def _capture(self, shape: StepShape) -> CapturedStep:
        with ExitStack() as made:
            buffer, constants, (parts, times) = self._planned(shape, made)
            transfer_all(self._device, [Transfer(buffer.address, constants.image())])
            early = early_starts(parts.plan)
            launches = [
                (n, self._launch(n, early=is_early))
                for n, is_early in zip(parts.plan.launches, early, strict=True)
            ]
            graph = made.enter_context(
                Graph(
                    self._main,
                    lambda: self._enqueue(parts.plan, launches),
                    str(shape),
                    node_priorities=shape.n_tokens >= FULL_TOKENS,
                )
            )
            graph.upload(self._main)
            choices = choices_shape(self._planner.model.spec, shape.n_tokens)
            writers = self._ring.writers(parts.layout)
            made.pop_all()
            self._graphs[shape] = graph, buffer
            places = () if self._first_choice is None else ((self._first_choice, choices),)
            kept = () if times is None else (times,)
            return CapturedStep(shape, graph, writers, len(launches), places, kept)

    def graph(self, shape: StepShape) -> Graph:
        """The graph of a shape that was captured."""
        return self._graphs[shape][0]

    def _launch(self, planned: PlannedLaunch, *, early: bool = False) -> Launch:
        x, y, z = (*planned.grid, 1, 1)[:3]
        return Launch(
            self._functions.function(planned.kernel, planned.shared_bytes),
            (x, y, z),
            planned.kernel.block,
            planned.kernel.pack(**planned.arguments),
            shared_bytes=planned.shared_bytes,
            overlapped=planned.overlapped,
            early=early,
        )

    def _enqueue(self, plan: LaunchPlan, launches: list[tuple[PlannedLaunch, Launch]]) -> None:
        """Put the plan's nodes into the streams that are being captured."""
        rest = iter(launches)
        for node in plan.nodes:
            if isinstance(node, PlannedLaunch):
                _, launch = next(rest)
                launch.enqueue(self._side if node.side else self._main)
            elif isinstance(node, Fork):
                self._main.record(self._fork)
                self._side.wait_for(self._fork)
            elif isinstance(node, Mark):
                self._side.record(self._mark(node.number))
            elif node.number is not None:
                self._main.wait_for(self._mark(node.number))
            else:
                self._side.record(self._join)
                self._main.wait_for(self._join)

    def _mark(self, number: int) -> Event:
        """The event of a mark, made when it is first needed."""
        while len(self._marks) <= number:
            self._marks.append(Event(self._device, "mark"))
        return self._marks[number]
