"""Kernel launches, and graphs of them that one driver call starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from runtime.cuda.module import Function
from runtime.cuda.resource import Resource
from runtime.cuda.stream import Stream
from runtime.errors import DeviceError

logger = logging.getLogger(__name__)

USE_NODE_PRIORITY = 8
"""CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY."""

LAUNCH_ORDER = 2
"""CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER: of a node whose blocks have all begun."""

EDGES_SINCE = 12030
"""CUDA's version since which edges of graphs say what they wait for."""

SET_DEPENDENCIES = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES."""


class Packed(Protocol):
    """Arguments where the driver reads them: `address` is of an array of pointers to values.

    `Kernel.pack` in ops.gpu.kernel makes them.
    """

    @property
    def address(self) -> int: ...


class Launch:
    """A kernel with everything a launch needs, put together once.

    grid          blocks in x, y, z
    block         threads of a block
    arguments     read when the launch is enqueued or captured, not when it runs
    shared_bytes  dynamic shared memory of a block
    overlapped    may start while its predecessor in the stream still runs; the text then waits
                  with griddepcontrol.wait (compute capability 9.0 or newer)
    early         in a graph it starts when all blocks of its predecessor have begun, even if that
                  one waits itself; what it does before it waits needs only what is older than both
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: int,
        arguments: Packed,
        *,
        shared_bytes: int = 0,
        overlapped: bool = False,
        early: bool = False,
    ) -> None:
        driver = function.module.device.driver
        api = driver.api
        self.function = function
        self.arguments = arguments
        self._early = early and driver.version >= EDGES_SINCE
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        if overlapped and not self._early:
            attribute = api.CUlaunchAttribute()
            kinds = api.CUlaunchAttributeID
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._config = config

    def enqueue(self, stream: Stream) -> None:
        """Put the kernel into the stream, or into the graph that is captured from it.

        One thread at a time. Raises: CudaError, OutOfDeviceMemory, DeviceLost.
        """
        if self._early:
            _begin_early(stream)
        self._config.hStream = stream.handle
        stream.device.call(
            "cuLaunchKernelEx", self._config, self.function.handle, self.arguments.address, 0
        )


class Graph(Resource):
    """A captured sequence of work, ready to run again and again.

    It holds addresses: the memory and modules of the work stay open as long as it runs. Load every
    function before a kernel that waits for the host is in flight; loading may wait for the GPU.
    """

    def __init__(
        self,
        stream: Stream,
        work: Callable[[], None],
        label: str = "graph",
        *,
        node_priorities: bool = False,
    ) -> None:
        """Capture what `work` puts into `stream` (and into streams that wait for it and that it
        waits for again), without running it. Nothing may be in `stream` that `work` waits for.

        node_priorities  a node keeps the priority of the stream that it was captured from, which
                         costs 0.8 us a fork on an H200; else all have that of the stream the graph
                         is launched into

        Raises: whatever `work` raises; CudaError, OutOfDeviceMemory. The stream is usable after.
        """
        device = stream.device
        flags = USE_NODE_PRIORITY if node_priorities else 0
        captured = _capture(stream, work)
        try:
            handle = device.call("cuGraphInstantiate", captured, flags)
            super().__init__(device, handle, label)
        finally:
            device.call("cuGraphDestroy", captured)

    def upload(self, stream: Stream) -> None:
        """Do ahead of time what the first launch would: 1-2 us a node. Raises: CudaError."""
        self.device.call("cuGraphUpload", self.handle, stream.handle)

    def launch(self, stream: Stream) -> None:
        """Put the whole graph into the stream. Raises: CudaError, DeviceLost."""
        self.device.call("cuGraphLaunch", self.handle, stream.handle)

    def _release(self, handle: Any) -> None:
        self.device.call("cuGraphExecDestroy", handle)


def _begin_early(stream: Stream) -> None:
    """What the stream captures next starts when all blocks of the kernel before it have begun."""
    device = stream.device
    api = device.driver.api
    status, _, _, before, *_ = device.call(_edges(api, "cuStreamGetCaptureInfo", 3), stream.handle)
    if status != api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE or len(before) != 1:
        return
    edge = api.CUgraphEdgeData()
    edge.from_port = LAUNCH_ORDER
    edge.type = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    name = _edges(api, "cuStreamUpdateCaptureDependencies", 2)
    device.call(name, stream.handle, before, [edge], 1, SET_DEPENDENCIES)


def _edges(api: Any, name: str, version: int) -> str:
    """The function's name where it knows of edges: bindings before CUDA 13 have others too."""
    return numbered if hasattr(api, numbered := f"{name}_v{version}") else name


def _capture(stream: Stream, work: Callable[[], None]) -> Any:
    device = stream.device
    # Thread-local: what other threads allocate meanwhile does not invalidate this capture.
    mode = device.driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    device.call("cuStreamBeginCapture", stream.handle, mode)
    try:
        work()
    except BaseException:
        _abandon(stream)
        raise
    return device.call("cuStreamEndCapture", stream.handle)


def _abandon(stream: Stream) -> None:
    """End a capture whose work failed; the driver may have ended it with an error already."""
    device = stream.device
    try:
        graph = device.call("cuStreamEndCapture", stream.handle)
    except DeviceError as error:
        logger.debug("abandoned capture: %s", error)
        return
    if int(graph):
        device.call("cuGraphDestroy", graph)
