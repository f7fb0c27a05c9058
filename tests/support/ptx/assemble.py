"""NVIDIA's assembler without a GPU: nvJitLink from PyPI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


class AssemblyError(Exception):
    """The assembler refuses the text; its log names file and line."""


@dataclass(frozen=True)
class Resources:
    """What an assembled kernel takes: registers a thread, bytes spilled, bytes of static shared
    memory."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def can_assemble() -> bool:
    """Whether nvJitLink is installed."""
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except (ImportError, RuntimeError):
        return False
    return True


def assemble(text: str, architecture: str) -> dict[str, Resources]:
    """The resources of each kernel of the text.

    Raises:
        AssemblyError: with the assembler's log.
    """
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}", "-verbose", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        data = text.encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "kernel.ptx")
        nvjitlink.complete(handle)
        log = _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
    except nvjitlink.nvJitLinkError as error:
        log = _log(nvjitlink.get_error_log_size, nvjitlink.get_error_log, handle)
        raise AssemblyError(f"{architecture}: {log or error}") from None
    finally:
        nvjitlink.destroy(handle)
    return {name: _resources(part) for name, part in _sections(log)}


def _log(size: Any, read: Any, handle: Any) -> str:
    buffer = bytearray(size(handle))
    read(handle, buffer)
    return buffer.decode().rstrip("\0\n")


def _sections(log: str) -> list[tuple[str, str]]:
    """(kernel, what ptxas says of it)."""
    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", log)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _resources(text: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes smem"),
    )
