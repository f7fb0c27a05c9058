"""How the fake driver's calls run: objects and their handles, streams, failures on demand."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.support.cuda_constants import ATTRIBUTES, ENUMS, CUresult
from tests.support.native_calls import NativeCalls

NO_CONTEXT = frozenset(
    f"cu{name}"
    for name in (
        *("Init", "DriverGetVersion", "GetErrorString", "DeviceGet", "DeviceGetCount"),
        *("DeviceGetName", "DeviceTotalMem", "DeviceGetAttribute", "DevicePrimaryCtxRetain"),
        *("DevicePrimaryCtxRelease", "CtxSetCurrent", "DeviceCanAccessPeer", "GetProcAddress"),
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

Operation = Callable[[], bool]
Kernel = Callable[..., None]


class Failure(Exception):
    """A call ends with this code."""

    def __init__(self, name: str) -> None:
        self.code = CUresult[f"CUDA_ERROR_{name}"]


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


class FakeCalls:
    """`fail` maps a function to the code it always answers with; the `out_of_memory_at`-th
    allocating call (from 0) finds no memory.  Functions are methods `_cu...` of what inherits.
    """

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
        self.host: Callable[[], None] | None = None
        """Plays the CPU while all threads of an interpreted kernel poll."""
        self.fail: dict[str, CUresult] = {}
        self.out_of_memory_at: int | None = None
        self.n_allocating = 0
        self.calls: Counter[str] = Counter()
        self.early_starts = 0
        self.objects: dict[int, tuple[str, Any]] = {}
        self.lost: CUresult | None = None
        self.raised: BaseException | None = None
        """What a native call has raised: the next call by Python does."""
        self.native = NativeCalls(self)
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
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised
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
