"""The CUDA driver's functions over host memory, with the names of cuda.bindings.driver.

Streams run in order; a held one waits, so that every interleaving is a test. While a kernel polls,
the other streams move on. Calls fail on demand, and `live` shows what was not given back. Kernels
are Python functions found by entry name; others are interpreted, from the text that was assembled,
and may touch no other memory than their GPU's, its peers' and the host's that is registered.
tests/cuda/test_fake_driver.py holds names, parameters and constants against the real bindings.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ptx
from tests.support import ptx as interpreter
from tests.support.cuda_constants import ATTRIBUTES, ENUMS, CUjit_option, CUresult
from tests.support.ptx.host_memory import HostMemory

NO_CONTEXT = frozenset(
    f"cu{name}"
    for name in (
        *("Init", "DriverGetVersion", "GetErrorString", "DeviceGet", "DeviceGetCount"),
        *("DeviceGetName", "DeviceTotalMem", "DeviceGetAttribute", "DevicePrimaryCtxRetain"),
        *("DevicePrimaryCtxRelease", "CtxSetCurrent", "DeviceCanAccessPeer"),
    )
)
"""Functions that work before a context is current."""

ALLOCATING = frozenset(
    f"cu{name}"
    for name in (
        *("DevicePrimaryCtxRetain", "MemAlloc", "MemHostRegister", "StreamCreateWithPriority"),
        *("EventCreate", "LinkCreate", "LinkAddData", "LinkComplete", "ModuleLoadData"),
        *("ModuleGetFunction", "FuncSetAttribute", "LaunchKernelEx", "StreamBeginCapture"),
        *("StreamEndCapture", "GraphInstantiate", "GraphUpload", "GraphLaunch"),
    )
)
"""Functions that the real driver may answer with CUDA_ERROR_OUT_OF_MEMORY."""

PAGE = mmap.PAGESIZE
"""What is registered is whole pages: no page may be in two registrations."""

Operation = Callable[[], bool]
Kernel = Callable[..., None]


class Failure(Exception):
    """A call ends with this code."""

    def __init__(self, name: str) -> None:
        self.code = CUresult[f"CUDA_ERROR_{name}"]


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


@dataclass
class FakeFunction:
    """An entry of a text, and its kernel in the interpreter once it has run."""

    entry: ptx.Entry
    text: str
    device: int
    kernel: interpreter.Kernel | None = None

    def interpreted(self) -> interpreter.Kernel:
        if self.kernel is None:
            self.kernel = interpreter.load(self.text, self.entry.name)[self.entry.name]
        return self.kernel


@dataclass
class FakeStream:
    device: int
    queue: deque[Operation] = field(default_factory=deque)
    held: bool = False
    busy: bool = False
    capture: list[Operation] | None = None


@dataclass
class FakeEvent:
    recorded: int = 0
    passed: int = 0
    capture: list[Operation] | None = None


class FakeDriver:
    """See the module. `fail` maps a function to the code it always answers with; the
    `out_of_memory_at`-th allocating call (from 0) finds no memory.

    Every GPU has `memory_bytes`, or what `device_bytes` says of it.
    """

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTREGISTER_READ_ONLY = 8
    CUlaunchAttribute = CUlaunchAttribute
    CUlaunchConfig = CUlaunchConfig

    def __init__(self, *, memory_bytes: int = 1 << 24, version: int = 13000) -> None:
        for enum in ENUMS:
            setattr(self, enum.__name__, enum)
        self.memory_bytes = memory_bytes
        self.version = version
        self.n_devices = 1
        self.device_bytes: dict[int, int] = {}
        self.peer_access = True
        self.attributes = {n: value for n, (_, value) in ATTRIBUTES.items()}
        self.kernels: dict[str, Kernel] = {}
        self._memories: dict[int, HostMemory] = {}
        self._peers: set[tuple[int, int]] = set()
        self._owners: dict[int, int] = {}
        self._registered: dict[int, list[int]] = {}
        self.host: Callable[[], None] | None = None
        """Plays the CPU while all threads of an interpreted kernel poll."""
        self.fail: dict[str, CUresult] = {}
        self.out_of_memory_at: int | None = None
        self.n_allocating = 0
        self.calls: Counter[str] = Counter()
        self.objects: dict[int, tuple[str, Any]] = {}
        self.lost: CUresult | None = None
        self._handles = count(0x1000)
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def live(self) -> dict[str, int]:
        """How many of each kind were not given back."""
        return dict(Counter(kind for kind, _ in self.objects.values()))

    @contextmanager
    def hold(self, stream: Any) -> Iterator[None]:
        """Work of the stream waits inside this."""
        held: FakeStream = self._get("stream", stream)
        held.held = True
        try:
            yield
        finally:
            self.release(stream)

    def release(self, stream: Any) -> None:
        """Let a held stream run."""
        with self._lock:
            self._get("stream", stream).held = False
            self._pump()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(self, f"_{name}")
        return lambda *args: self._call(name, function, args)

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.calls[name] += 1
        try:
            with self._lock:
                self._may_fail(name)
                result = function(*args)
        except Failure as failure:
            return (failure.code, None)
        if result is None:
            return (CUresult(0),)
        return (CUresult(0), *(result if isinstance(result, tuple) else (result,)))

    def _may_fail(self, name: str) -> None:
        if name not in NO_CONTEXT:
            if self.lost is not None:
                raise Failure(self.lost.name.removeprefix("CUDA_ERROR_"))
            if getattr(self._thread, "context", None) not in self.objects:
                raise Failure("INVALID_CONTEXT")
        if name in self.fail:
            raise Failure(self.fail[name].name.removeprefix("CUDA_ERROR_"))
        if name in ALLOCATING:
            self.n_allocating += 1
            if self.n_allocating - 1 == self.out_of_memory_at:
                if name == "cuStreamEndCapture":  # ends the capture all the same
                    self.out_of_memory_at = None
                    self._drop("graph", self._cuStreamEndCapture(self._capturing()))
                raise Failure("OUT_OF_MEMORY")

    def _capturing(self) -> int:
        return next(
            handle
            for handle, (kind, stream) in self.objects.items()
            if kind == "stream" and stream.capture is not None
        )

    def _new(self, kind: str, value: Any = None, handle: int | None = None) -> int:
        handle = next(self._handles) if handle is None else handle
        self.objects[handle] = (kind, value)
        return handle

    def _get(self, kind: str, handle: Any) -> Any:
        found, value = self.objects.get(int(handle), ("", None))
        if found != kind:
            raise Failure("INVALID_HANDLE")
        return value

    def _drop(self, kind: str, handle: Any) -> None:
        self._get(kind, handle)
        del self.objects[int(handle)]

    def _enqueue(self, stream: Any, operation: Operation) -> None:
        target: FakeStream = self._get("stream", stream)
        if target.device != self._device_now():
            raise Failure("INVALID_CONTEXT")
        if target.capture is not None:
            target.capture.append(operation)
            return
        target.queue.append(operation)
        self._pump()

    def _pump(self) -> None:
        """Run what can run: the head of each stream until it has to wait for another's event."""
        while any(self._move(stream) for stream in self._streams()):
            pass

    def _move(self, stream: FakeStream) -> bool:
        """Run the head of the stream; whether it could and did."""
        if not stream.queue or stream.held or stream.busy:
            return False
        stream.busy = True
        try:
            moved = stream.queue[0]()
        finally:
            stream.busy = False
        if moved:
            stream.queue.popleft()
        return moved

    def _streams(self) -> list[FakeStream]:
        return [value for kind, value in list(self.objects.values()) if kind == "stream"]

    def _look(self) -> None:
        """Between two looks of a polling kernel: one operation of another stream, and the CPU."""
        any(self._move(stream) for stream in self._streams())
        if self.host is not None:
            self.host()

    def _device_now(self) -> int:
        """The device whose context is current in this thread."""
        device: int = self._get("context", self._thread.context)
        return device

    def _memory_of(self, device: int) -> HostMemory:
        """What kernels of the device may touch."""
        if device not in self._memories:
            self._memories[device] = HostMemory()
        return self._memories[device]

    def _reaching(self, device: int) -> list[HostMemory]:
        """Of the devices that may touch memory of this one."""
        others = [self._memory_of(of) for of, peer in self._peers if peer == device]
        return [self._memory_of(device), *others]

    # The driver's functions, without the code in front of what they return.

    def _cuInit(self, Flags: int) -> None:
        if self.n_devices == 0:
            raise Failure("NO_DEVICE")

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuGetErrorString(self, error: Any) -> bytes:
        return f"words for {error.name}".encode()

    def _cuDeviceGetCount(self) -> int:
        return self.n_devices

    def _cuDeviceGet(self, ordinal: int) -> int:
        if not 0 <= ordinal < self.n_devices:
            raise Failure("INVALID_DEVICE")
        return ordinal

    def _cuDeviceGetName(self, length: int, dev: Any) -> bytes:
        return f"Fake GPU {dev}".encode().ljust(length, b"\0")

    def _cuDeviceTotalMem(self, dev: Any) -> int:
        return self._total(int(dev))

    def _total(self, device: int) -> int:
        return self.device_bytes.get(device, self.memory_bytes)

    def _cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        return int(self.peer_access and dev != peerDev)

    def _cuCtxEnablePeerAccess(self, peerContext: Any, Flags: int) -> None:
        device, peer = self._device_now(), self._get("context", peerContext)
        if not self._cuDeviceCanAccessPeer(device, peer):
            raise Failure("PEER_ACCESS_UNSUPPORTED")
        if (device, peer) in self._peers:
            raise Failure("PEER_ACCESS_ALREADY_ENABLED")
        self._peers.add((device, peer))
        for handle, owner in self._owners.items():
            if owner == peer:
                self._memory_of(device).open(handle, self._get("memory", handle).nbytes)

    def _cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        return self.attributes[attrib.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _cuDevicePrimaryCtxRetain(self, dev: Any) -> int:
        return self._new("context", dev)

    def _cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        contexts = [
            h for h, (kind, owner) in self.objects.items() if (kind, owner) == ("context", dev)
        ]
        if not contexts:
            raise Failure("INVALID_CONTEXT")
        del self.objects[contexts[-1]]

    def _cuCtxSetCurrent(self, ctx: Any) -> None:
        self._thread.context = ctx

    def _cuCtxSynchronize(self) -> None:
        for stream in self._streams():
            stream.held = stream.held and stream.device != self._device_now()
        self._pump()

    def _cuMemGetInfo(self) -> tuple[int, int]:
        device = self._device_now()
        mine = [handle for handle, owner in self._owners.items() if owner == device]
        total = self._total(device)
        return total - sum(self._get("memory", handle).nbytes for handle in mine), total

    def _cuMemAlloc(self, bytesize: int) -> int:
        if bytesize <= 0:
            raise Failure("INVALID_VALUE")
        if bytesize > self._cuMemGetInfo()[0]:
            raise Failure("OUT_OF_MEMORY")
        whole = np.full(bytesize + 256, 0xA5, np.uint8)
        memory = whole[-whole.ctypes.data % 256 :][:bytesize]  # aligned as the driver's are
        device = self._owners[memory.ctypes.data] = self._device_now()
        for reaching in self._reaching(device):
            reaching.open(memory.ctypes.data, bytesize)
        return self._new("memory", memory, memory.ctypes.data)

    def _cuMemFree(self, dptr: Any) -> None:
        self._drop("memory", dptr)
        for reaching in self._reaching(self._owners.pop(int(dptr))):
            reaching.close(int(dptr))

    def _cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> None:
        pages = [a // PAGE for a in (p, p + bytesize - 1)]
        for other in self._registered:
            last = (other + self._get("registered", other) - 1) // PAGE
            if pages[0] <= last and other // PAGE <= pages[1]:
                raise Failure("HOST_MEMORY_ALREADY_REGISTERED")
        self._new("registered", bytesize, p)
        writable = not Flags & self.CU_MEMHOSTREGISTER_READ_ONLY
        self._registered[p] = self._registered_for(Flags)
        for device in self._registered[p]:
            self._memory_of(device).open(p, bytesize, writable=writable)

    def _registered_for(self, flags: int) -> list[int]:
        """The devices that may touch memory registered with the flags."""
        if flags & self.CU_MEMHOSTREGISTER_PORTABLE:
            return list(range(self.n_devices))
        return [self._device_now()]

    def _cuMemHostUnregister(self, p: int) -> None:
        if self.objects.get(p, ("",))[0] != "registered":
            raise Failure("HOST_MEMORY_NOT_REGISTERED")
        del self.objects[p]
        for device in self._registered.pop(p):
            self._memory_of(device).close(p)

    def _cuMemHostGetDevicePointer(self, p: int, Flags: int) -> int:
        self._get("registered", p)
        return p

    def _check_registrations(self, host: int, nbytes: int) -> None:
        """A copy that begins in registered memory ends in the same registration."""
        for handle in self._registered:
            if handle <= host < handle + self._get("registered", handle) < host + nbytes:
                raise Failure("INVALID_VALUE")

    def _span(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of device memory there, which one allocation has to hold."""
        for handle, (kind, memory) in self.objects.items():
            if (
                kind == "memory"
                and handle <= address
                and address + nbytes <= handle + memory.nbytes
            ):
                return memory[address - handle :][:nbytes]  # type: ignore[no-any-return]
        raise Failure("INVALID_VALUE")

    def _cuMemcpyHtoDAsync(
        self, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any
    ) -> None:
        target = self._span(int(dstDevice), ByteCount).ctypes.data
        self._check_registrations(int(srcHost), ByteCount)
        self._enqueue(hStream, lambda: bool(ctypes.memmove(target, srcHost, ByteCount)))

    def _cuMemcpyDtoHAsync(
        self, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any
    ) -> None:
        source = self._span(int(srcDevice), ByteCount).ctypes.data
        self._enqueue(hStream, lambda: bool(ctypes.memmove(dstHost, source, ByteCount)))

    def _cuMemcpyDtoDAsync(
        self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any
    ) -> None:
        target = self._span(int(dstDevice), ByteCount).ctypes.data
        source = self._span(int(srcDevice), ByteCount).ctypes.data
        self._enqueue(hStream, lambda: bool(ctypes.memmove(target, source, ByteCount)))

    def _cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        target = self._span(int(dstDevice), N)
        address = target.ctypes.data
        self._enqueue(hStream, lambda: bool(ctypes.memset(address, uc, N)))

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

    def _cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: int, extra: int) -> None:
        if f.device != self._device_now():
            raise Failure("INVALID_HANDLE")
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
