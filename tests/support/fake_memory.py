"""The fake driver's devices, contexts and memory, which is host memory."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.fake_calls import Failure, FakeCalls
from tests.support.ptx.host_memory import HostMemory

PAGE = mmap.PAGESIZE
"""What is registered is whole pages: no page may be in two registrations."""


class CUdeviceptr(int):
    """Lists of addresses have to consist of these."""


class CUmemcpyAttributes:
    def __init__(self) -> None:
        self.srcAccessOrder: Any = 0


class FakeMemory(FakeCalls):
    """Every GPU has `memory_bytes`, or what `device_bytes` says of it."""

    CUdeviceptr = CUdeviceptr
    CUmemcpyAttributes = CUmemcpyAttributes
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTREGISTER_READ_ONLY = 8

    def __init__(self, *, memory_bytes: int = 1 << 24, version: int = 13000) -> None:
        super().__init__(memory_bytes=memory_bytes, version=version)
        self._memories: dict[int, HostMemory] = {}
        self._peers: set[tuple[int, int]] = set()
        self._owners: dict[int, int] = {}
        self._holders: dict[Any, int] = {}
        self._registered: dict[int, list[int]] = {}

    def _memory_of(self, device: int) -> HostMemory:
        """What kernels of the device may touch."""
        if device not in self._memories:
            self._memories[device] = HostMemory()
        return self._memories[device]

    def _reaching(self, device: int) -> list[HostMemory]:
        """Of the devices that may touch memory of this one."""
        others = [self._memory_of(of) for of, peer in self._peers if peer == device]
        return [self._memory_of(device), *others]

    def _cuInit(self, Flags: int) -> None:
        if self.n_devices == 0:
            raise Failure("NO_DEVICE")

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuGetProcAddress(self, symbol: bytes, cudaVersion: int, flags: Any) -> tuple[int, int]:
        if cudaVersion > self.version:
            raise Failure("NOT_FOUND")
        return self.native.address(symbol.decode()), 0

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
        """The same one for all that hold it."""
        self._holders[dev] = self._holders.get(dev, 0) + 1
        return self._contexts(dev)[0] if self._contexts(dev) else self._new("context", dev)

    def _contexts(self, dev: Any) -> list[int]:
        return [h for h, found in self.objects.items() if found == ("context", dev)]

    def _cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        if not self._contexts(dev):
            raise Failure("INVALID_CONTEXT")
        self._holders[dev] -= 1
        if not self._holders[dev]:
            del self.objects[self._contexts(dev)[0]]

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

    def _cuMemcpyBatchAsync(
        self, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any,
        numAttrs: int, hStream: Any,
    ) -> None:  # fmt: skip
        if any(not isinstance(at, CUdeviceptr) for at in (*dsts, *srcs)):
            raise TypeError("expected list[CUdeviceptr]")
        if list(attrsIdxs) != [0] or numAttrs != 1 or not attrs[0].srcAccessOrder:
            raise Failure("INVALID_VALUE")
        if not count == len(dsts) == len(srcs) == len(sizes):
            raise Failure("INVALID_VALUE")
        targets = [self._span(dst, n).ctypes.data for dst, n in zip(dsts, sizes, strict=True)]
        for src, n in zip(srcs, sizes, strict=True):
            self._check_registrations(src, n)

        def copied() -> bool:
            for copy in reversed(list(zip(targets, srcs, sizes, strict=True))):  # in any order
                ctypes.memmove(*copy)
            return True

        self._enqueue(hStream, copied)

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
