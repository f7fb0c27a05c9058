"""CapturedSteps: the graph of every shape of step, captured when it is first needed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock

from ops.gpu.kernel import Kernel
from runtime.cuda.device import Device
from runtime.cuda.graph import Graph, Launch
from runtime.cuda.memory import DeviceBuffer
from runtime.cuda.stream import Event, Stream
from runtime.engine.gpu.control import ControlRing, ControlWriter
from runtime.engine.gpu.experts import choices_shape
from runtime.engine.gpu.functions import Functions, KernelKey, key_of
from runtime.engine.gpu.launch_plan import Constants, Fork, LaunchPlan, PlannedLaunch, Room
from runtime.engine.gpu.plan_parts import StepMemory
from runtime.engine.gpu.step_graph import StepPlanner
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.gpu.transfer import Transfer, transfer_all

NEWEST_SHARE = 0.2
"""Of the measured time of a step in the time that is expected of the next one."""


@dataclass
class CapturedStep:
    """A graph, where its steps are written, and the seconds that they took lately."""

    graph: Graph
    constants: DeviceBuffer
    writers: list[ControlWriter]
    n_launches: int
    choices_shape: tuple[int, int, int]
    seconds: float = 0.0

    def took(self, seconds: float) -> None:
        """A step ran for so long."""
        share = NEWEST_SHARE if self.seconds else 1.0
        self.seconds += share * (seconds - self.seconds)

    def close(self) -> None:
        self.graph.close()
        self.constants.close()


@dataclass
class Needs:
    """What plans of some shapes take: bytes of room and of control blocks, kernels."""

    room_bytes: int = 0
    block_bytes: int = 0
    control_bytes: int = 0
    kernels: dict[KernelKey, Kernel] = field(default_factory=dict)


def needs_of(planner: StepPlanner, shapes: list[StepShape]) -> Needs:
    """What all of these shapes need; nothing is allocated."""
    needs, layers = Needs(), planner.distinct_layers()
    for shape in shapes:
        room = Room()
        parts = planner.plan(shape, StepMemory(), room, Constants(), layers)
        needs.room_bytes = max(needs.room_bytes, room.n_bytes)
        needs.block_bytes = max(needs.block_bytes, parts.layout.block_bytes)
        needs.control_bytes = max(needs.control_bytes, parts.layout.n_bytes)
        for launch in parts.plan.launches:
            needs.kernels[key_of(launch.kernel)] = launch.kernel
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
    ) -> None:
        self._device, self._planner, self._functions = device, planner, functions
        self._memory, self._ring, self._room = memory, ring, room
        self._steps: dict[StepShape, CapturedStep] = {}
        self._capturing = Lock()
        # What is captured runs in the stream that a graph is launched into, not in these.
        self._main = Stream(device, "capture")
        # First in line: the CPU waits for what the mailboxes post.
        self._side = Stream(device, "capture of a side branch", priority=-1)
        self._fork, self._join = Event(device, "fork"), Event(device, "join")

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

    def launches(self, shape: StepShape) -> list[tuple[PlannedLaunch, Launch]]:
        """The launches of a shape one by one, for timing; the shape must be captured."""
        step = self.of(shape)
        room, constants = Room(self._room.address), Constants(step.constants.address)
        plan = self._planner.plan(shape, self._memory, room, constants).plan
        return [(planned, self._launch(planned)) for planned in plan.launches]

    def close(self) -> None:
        with self._capturing:
            for step in self._steps.values():
                step.close()
            self._steps.clear()
        for resource in (self._fork, self._join, self._side, self._main):
            resource.close()

    def _capture(self, shape: StepShape) -> CapturedStep:
        measured = Constants()
        self._planner.plan(shape, self._memory, Room(self._room.address), measured)
        with ExitStack() as made:
            n_bytes = max(measured.n_bytes, 1)
            buffer = made.enter_context(DeviceBuffer(self._device, n_bytes, "graph constants"))
            constants = Constants(buffer.address)
            room = Room(self._room.address)
            parts = self._planner.plan(shape, self._memory, room, constants)
            transfer_all(self._device, [Transfer(buffer.address, constants.image())])
            launches = [(n, self._launch(n)) for n in parts.plan.launches]
            graph = made.enter_context(
                Graph(self._main, lambda: self._enqueue(parts.plan, launches), str(shape))
            )
            graph.upload(self._main)
            choices = choices_shape(self._planner.model.spec, shape.n_tokens)
            writers = self._ring.writers(parts.layout)
            made.pop_all()
            return CapturedStep(graph, buffer, writers, len(launches), choices)

    def _launch(self, planned: PlannedLaunch) -> Launch:
        x, y, z = (*planned.grid, 1, 1)[:3]
        return Launch(
            self._functions.function(planned.kernel, planned.shared_bytes),
            (x, y, z),
            planned.kernel.block,
            planned.kernel.pack(**planned.arguments),
            shared_bytes=planned.shared_bytes,
            overlapped=planned.overlapped,
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
            else:
                self._side.record(self._join)
                self._main.wait_for(self._join)
