"""Kernels' text becomes code of the device: assembled once, then read from a cache on disk."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path
from typing import Any

import ptx
from ops.user_cache import user_cache
from runtime.cuda.device import Device
from runtime.cuda.resource import Resource
from runtime.errors import CudaError, DeviceLost, OutOfDeviceMemory, PtxCompileError

logger = logging.getLogger(__name__)

LOG_BYTES = 16384
DIGEST_BYTES = 32


class CubinCache:
    """Assembled kernels in a folder, one file for a text, an architecture and a driver version; and
    one for each recipe of a text, that says which text it makes.

    A file starts with the SHA-256 of the rest: what was cut short or altered is not there. A
    folder that cannot be used leaves `reason` non-empty, costs time and breaks nothing.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: default the user's cache directory; it is created by the first `put`."""
        self.directory = directory if directory is not None else default_directory()
        self.reason = ""

    def get(self, key: str) -> bytes | None:
        """What was put under `key`, if it is whole."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.reason = str(error)
            return None
        digest, cubin = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return cubin if hashlib.sha256(cubin).digest() == digest else None

    def put(self, key: str, cubin: bytes) -> None:
        """Keep `cubin`; readers see all of it or nothing. Failing is a reason, not an error."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(cubin).digest() + cubin)
                os.replace(name, self._path(key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self.reason = str(error)

    def text_hash(self, recipe: str) -> str | None:
        """Of the text that this recipe made before."""
        found = self.get(recipe)
        return None if found is None else found.decode()

    def note(self, recipe: str, text_hash: str) -> None:
        """Keep which text the recipe makes."""
        self.put(recipe, text_hash.encode())

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.cubin"


def default_directory() -> Path:
    """Where assembled kernels are kept; nothing is created."""
    return user_cache() / "cubins"


class Function:
    """An entry of a module, alive as long as the module is open."""

    def __init__(self, module: Module, entry: str, handle: Any) -> None:
        self.module = module
        self.entry = entry
        self._handle = handle
        self._allowed = 0

    @property
    def handle(self) -> Any:
        """What driver calls take. Raises: EngineBug once the module is closed."""
        return self._handle if not self.module.closed else self.module.handle

    def allow_shared_bytes(self, nbytes: int) -> None:
        """Let blocks have at least that much dynamic shared memory.

        Needed where it and what the text declares exceed 48 KiB. Never less than before: captured
        launches may ask for more than this one.

        Raises: CudaError if a multiprocessor has less.
        """
        if nbytes <= self._allowed:
            return
        device = self.module.device
        kinds = device.driver.api.CUfunction_attribute
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device.call("cuFuncSetAttribute", self.handle, kind, nbytes)
        self._allowed = nbytes


class Module(Resource):
    """A PTX text loaded on a device.

    text    expanded, as `ptx.expand` returns it, or what makes it
    cache   where its code is kept between processes
    recipe  a hash of what the text is made of: with it a text that is known need not be made
    """

    def __init__(
        self,
        device: Device,
        text: str | Callable[[], str],
        label: str,
        cache: CubinCache | None = None,
        *,
        recipe: str | None = None,
    ) -> None:
        """Raises: PtxCompileError with the assembler's log, OutOfDeviceMemory, CudaError."""
        make = text if callable(text) else lambda: text
        super().__init__(device, _load(device, make, label, cache, recipe), label)

    def function(self, entry: str) -> Function:
        """The entry of that name. Raises: CudaError if the text has none."""
        handle = self.device.call("cuModuleGetFunction", self.handle, entry.encode())
        return Function(self, entry, handle)

    def _release(self, handle: Any) -> None:
        self.device.call("cuModuleUnload", handle)


def _load(
    device: Device,
    make: Callable[[], str],
    label: str,
    cache: CubinCache | None,
    recipe: str | None,
) -> Any:
    if cache is None:
        return device.call("cuModuleLoadData", assemble(device, make(), label))
    make = cached(make)
    text_hash = None if recipe is None else cache.text_hash(recipe)
    if text_hash is None:
        text_hash = ptx.text_hash(make())
        if recipe is not None:
            cache.note(recipe, text_hash)
    key = f"{text_hash}-{device.info.architecture}-{device.driver.version}"
    cubin = cache.get(key)
    if cubin is not None:
        try:
            return device.call("cuModuleLoadData", cubin)
        except (DeviceLost, OutOfDeviceMemory):
            raise
        except CudaError as error:
            logger.debug("%s is assembled anew: %s", label, error)
    cubin = assemble(device, make(), label)
    cache.put(key, cubin)
    return device.call("cuModuleLoadData", cubin)


def assemble(device: Device, text: str, label: str) -> bytes:
    """The text's code for this device, by the driver's own assembler.

    Raises: PtxCompileError, OutOfDeviceMemory, DeviceLost.
    """
    options = device.driver.api.CUjit_option
    log = bytearray(LOG_BYTES)
    keys = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    state = device.call("cuLinkCreate", len(keys), keys, [log, len(log)])
    try:
        kind = device.driver.api.CUjitInputType.CU_JIT_INPUT_PTX
        data = text.encode() + b"\0"
        name = re.sub(r"[^\w.-]", "_", label).encode()
        device.call("cuLinkAddData", state, kind, data, len(data), name, 0, [], [])
        address, nbytes = device.call("cuLinkComplete", state)
        return ctypes.string_at(int(address), int(nbytes))
    except (DeviceLost, OutOfDeviceMemory):
        raise
    except CudaError as error:
        said = log.split(b"\0", 1)[0].decode(errors="replace").strip()
        raise PtxCompileError(label, said or str(error)) from error
    finally:
        device.call("cuLinkDestroy", state)
