"""The CUDA driver's functions over host memory, with the names of cuda.bindings.driver.

Streams run in order; a held one waits, so that every interleaving is a test. While a kernel polls,
the other streams move on. Calls fail on demand, and `live` shows what was not given back. Kernels
are Python functions found by entry name; others are interpreted, from the text that was assembled,
and may touch no other memory than their GPU's, its peers' and the host's that is registered.
tests/cuda/test_fake_driver.py holds names, parameters and constants against the real bindings.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

import ptx
from tests.support import ptx as interpreter
from tests.support.cuda_constants import CUgraphDependencyType, CUjit_option, CUresult
from tests.support.fake_calls import ALLOCATING, NO_CONTEXT, Failure, FakeEvent, FakeStream
from tests.support.fake_memory import FakeMemory

__all__ = ["ALLOCATING", "NO_CONTEXT", "Failure", "FakeDriver"]


class CUlaunchAttribute:
    def __init__(self) -> None:
        self.id: Any = None
        self.value = type("Value", (), {"programmaticStreamSerializationAllowed": 0})()


class CUlaunchConfig:
    def __init__(self) -> None:
        self.attrs: list[CUlaunchAttribute] = []
        self.numAttrs = self.sharedMemBytes = self.hStream = 0
        self.gridDimX = self.gridDimY = self.gridDimZ = 1
        self.blockDimX = self.blockDimY = self.blockDimZ = 1


class CUgraphEdgeData:
    def __init__(self) -> None:
        self.from_port = self.to_port = self.type = 0


@dataclass
class FakeFunction:
    """An entry of a text, and its kernel in the interpreter once it has run."""

    entry: ptx.Entry
    text: str
    device: int
    kernel: interpreter.Kernel | None = None
    allowed: int = 0
    """Bytes of dynamic shared memory that blocks may have, where somebody has said so."""

    def may_have(self, shared_bytes: int) -> bool:
        """Whether blocks may; without a word what they declare and it are 48 KiB at most."""
        return shared_bytes <= (self.allowed or (48 << 10) - _declared_bytes(self.text))

    def interpreted(self) -> interpreter.Kernel:
        if self.kernel is None:
            self.kernel = interpreter.load(self.text, self.entry.name)[self.entry.name]
        return self.kernel


class FakeDriver(FakeMemory):
    """See the module; `FakeCalls` for failures on demand, `FakeMemory` for the GPUs' memory."""

    CUlaunchAttribute = CUlaunchAttribute
    CUlaunchConfig = CUlaunchConfig
    CUgraphEdgeData = CUgraphEdgeData

    # The driver's functions, without the code in front of what they return.

    def _cuStreamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self._new("stream", FakeStream(self._device_now()))

    def _cuStreamDestroy(self, hStream: Any) -> None:
        self._drop("stream", hStream)

    def _cuStreamQuery(self, hStream: Any) -> None:
        if self._get("stream", hStream).queue:
            raise Failure("NOT_READY")

    def _cuStreamSynchronize(self, hStream: Any) -> None:
        if self._get("stream", hStream).queue:
            raise AssertionError("this would hang: the stream is held, or waits for one that is")

    def _cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        event: FakeEvent = self._get("event", hEvent)
        if event.capture is not None:
            self._get("stream", hStream).capture = event.capture
            return
        ticket = event.recorded
        self._enqueue(hStream, lambda: event.passed >= ticket)

    def _cuEventCreate(self, Flags: int) -> int:
        return self._new("event", FakeEvent())

    def _cuEventDestroy(self, hEvent: Any) -> None:
        self._drop("event", hEvent)

    def _cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        event: FakeEvent = self._get("event", hEvent)
        event.capture = self._get("stream", hStream).capture
        if event.capture is not None:
            return
        event.recorded += 1
        ticket = event.recorded

        def passed() -> bool:
            event.passed = max(event.passed, ticket)
            return True

        self._enqueue(hStream, passed)

    def _cuEventQuery(self, hEvent: Any) -> None:
        event: FakeEvent = self._get("event", hEvent)
        if event.passed < event.recorded:
            raise Failure("NOT_READY")

    def _cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> float:
        self._cuEventQuery(hStart)
        self._cuEventQuery(hEnd)
        return 0.5

    def _cuLinkCreate(self, numOptions: int, options: Any, optionValues: Any) -> int:
        values = dict(zip(options, optionValues, strict=True))
        return self._new("linker", [values[CUjit_option(5)], b""])

    def _cuLinkAddData(
        self, state: Any, typename: Any, data: bytes, size: int, name: bytes, numOptions: int,
        options: Any, optionValues: Any,
    ) -> None:  # fmt: skip
        log, _ = linker = self._get("linker", state)
        if b".version" not in data:
            message = b"error   : Binary format for key='0', ident='' is not recognized"
            log[: len(message)] = message
            raise Failure("INVALID_PTX")
        linker[1] = ctypes.create_string_buffer(b"CUBIN" + data[: size - 1], size + 4)

    def _cuLinkComplete(self, state: Any) -> tuple[int, int]:
        cubin = self._get("linker", state)[1]
        return ctypes.addressof(cubin), len(cubin)

    def _cuLinkDestroy(self, state: Any) -> None:
        self._drop("linker", state)

    def _cuModuleLoadData(self, image: bytes) -> int:
        if not image.startswith(b"CUBIN"):
            raise Failure("INVALID_IMAGE")
        text = image[5:].decode()
        entries = ptx.entries(text)
        return self._new(
            "module", {e.name: FakeFunction(e, text, self._device_now()) for e in entries}
        )

    def _cuModuleUnload(self, hmod: Any) -> None:
        self._drop("module", hmod)

    def _cuModuleGetFunction(self, hmod: Any, name: bytes) -> Any:
        entries = self._get("module", hmod)
        if name.decode() not in entries:
            raise Failure("NOT_FOUND")
        return entries[name.decode()]

    def _cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> None:
        if value > self.attributes["MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"]:
            raise Failure("INVALID_VALUE")
        hfunc.allowed = value

    def _cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: int, extra: int) -> None:
        if f.device != self._device_now():
            raise Failure("INVALID_HANDLE")
        if not f.may_have(config.sharedMemBytes):
            raise Failure("INVALID_VALUE")
        params = f.entry.params
        pointers = (ctypes.c_uint64 * len(params)).from_address(kernelParams)
        values = [
            (ctypes.c_uint64 if param.n_bytes == 8 else ctypes.c_uint32).from_address(at).value
            for at, param in zip(pointers, params, strict=True)
        ]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block, shared_bytes = config.blockDimX, config.sharedMemBytes
        self._enqueue(config.hStream, lambda: self._run(f, grid, block, shared_bytes, values))

    def _run(
        self,
        function: FakeFunction,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        values: list[int],
    ) -> bool:
        name = function.entry.name
        if name not in self.kernels:
            arguments = [
                float(np.uint32(value).view(np.float32)) if param.type == "f32" else value
                for value, param in zip(values, function.entry.params, strict=True)
            ]
            function.interpreted().launch(
                self._memory_of(function.device), grid, (block,), arguments,
                dynamic_shared=shared_bytes, host=self._look,
            )  # fmt: skip
            return True
        try:
            self.kernels[name](self._span, *values)
        except Failure:
            self.lost = CUresult["CUDA_ERROR_ILLEGAL_ADDRESS"]
        return True

    def _cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        self._get("stream", hStream).capture = []

    def _cuStreamEndCapture(self, hStream: Any) -> int:
        captured = self._get("stream", hStream).capture
        if captured is None:
            raise Failure("STREAM_CAPTURE_INVALIDATED")
        for kind, value in self.objects.values():
            if kind in ("stream", "event") and value.capture is captured:
                value.capture = None
        return self._new("graph", captured)

    def _cuStreamGetCaptureInfo(self, hStream: Any) -> tuple[Any, ...]:
        captured = self._get("stream", hStream).capture
        nodes = [len(captured)] if captured else []
        return int(captured is not None), 1, 0, nodes, [CUgraphEdgeData()] * len(nodes), len(nodes)

    def _cuStreamUpdateCaptureDependencies(
        self, hStream: Any, dependencies: Any, dependencyData: Any, numDependencies: int, flags: int
    ) -> None:
        captured = self._get("stream", hStream).capture
        edges = [(edge.from_port, edge.to_port, edge.type) for edge in dependencyData]
        programmatic = CUgraphDependencyType["CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC"]
        if dependencies != [len(captured)] or edges != [(2, 0, programmatic)] or flags != 1:
            raise Failure("INVALID_VALUE")
        self.early_starts += 1

    def _cuGraphInstantiate(self, hGraph: Any, flags: int) -> int:
        return self._new("executable", list(self._get("graph", hGraph)))

    def _cuGraphDestroy(self, hGraph: Any) -> None:
        self._drop("graph", hGraph)

    def _cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        self._drop("executable", hGraphExec)

    def _cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        self._get("executable", hGraphExec)

    def _cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        for operation in self._get("executable", hGraphExec):
            self._enqueue(hStream, operation)


def _declared_bytes(text: str) -> int:
    """Of the shared memory that the text itself declares."""
    found = re.findall(r"(?<!\.extern )\.shared[^;\[]*\.[bsuf](\d+)\s+\w+\[(\d+)\];", text)
    return sum(int(bits) // 8 * int(count) for bits, count in found)
