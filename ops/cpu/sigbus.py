"""A bus error while reading a mapped file ends the process with one line that names the file.

The kernel raises it when a file became shorter than its map or the medium fails.  The fault may
hit a compiled kernel's thread, where no Python can run: so the handler is compiled too, and does
nothing but look up the address, write(2) a prepared message and _exit(2).
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding
import numpy as np
from numpy.typing import NDArray

from ops.cpu.c_functions import c_function
from ops.cpu.job import job_kernel
from ops.cpu.memory import call_i64, load_i64, named_place
from ops.cpu.program import address_of, aligned

EXIT_STATUS = 74
"""EX_IOERR of sysexits.h."""

_SI_ADDRESS = 16  # of siginfo_t on 64-bit Linux
_SA_SIGINFO = 4
_STDERR = 2
_BUS_ERROR = int(signal.SIGBUS)
_ROW_BYTES = 32  # four int64: first address, end, message, length of the message

_N_ROWS, _ROWS, _BEFORE, _WRITE, _EXIT, _SIGACTION = range(0, 48, 8)
"""What the handler reads: int64 each; addresses but for the first."""
_STATE = aligned(6, np.int64)
_STATE_NAME = "hotexpert_bus_errors"

_state = named_place(_STATE_NAME)


@job_kernel
def on_bus_error(number: int, info: int, context: int) -> None:
    """The signal handler, with a handler's three arguments."""
    state = _state()
    address = load_i64(info + _SI_ADDRESS)
    for i in range(load_i64(state + _N_ROWS)):
        row = load_i64(state + _ROWS) + i * _ROW_BYTES
        if load_i64(row) <= address < load_i64(row + 8):
            call_i64(load_i64(state + _WRITE), (_STDERR, load_i64(row + 16), load_i64(row + 24)))
            call_i64(load_i64(state + _EXIT), (EXIT_STATUS,))
    # Not ours: the fault happens again as soon as the previous handler is back.
    call_i64(load_i64(state + _SIGACTION), (_BUS_ERROR, load_i64(state + _BEFORE), 0))


class _SigAction(ctypes.Structure):
    """struct sigaction of 64-bit Linux, glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@dataclass
class _Watch:
    """The process's maps that are watched, and what the handler took the place of."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    maps: list[tuple[object, int, int]] = field(default_factory=list)
    before: _SigAction = field(default_factory=_SigAction)
    shown: tuple[NDArray[np.int64], list[Any]] | None = None

    def add(self, maps: Sequence[tuple[object, int, int]]) -> None:
        with self.lock:
            first = not self.maps
            self.maps += maps
            self._show()
            if first and self.maps:
                ours = _SigAction(handler=on_bus_error.address, flags=_SA_SIGINFO)
                _sigaction(ours, self.before)

    def remove(self, maps: Sequence[tuple[object, int, int]]) -> None:
        with self.lock:
            for item in maps:
                self.maps.remove(item)
            if maps and not self.maps:
                _sigaction(self.before, None)
            self._show()

    def _show(self) -> None:
        """Have the handler see the maps.  It sees none for a moment."""
        messages = [ctypes.create_string_buffer(_message(name)) for name, _, _ in self.maps]
        rows = [
            (address, address + n_bytes, ctypes.addressof(message), len(message) - 1)
            for (_, address, n_bytes), message in zip(self.maps, messages, strict=True)
        ]
        table = np.array(rows, np.int64).reshape(-1, 4)
        _STATE[_N_ROWS // 8] = 0
        _STATE[_ROWS // 8] = address_of(table)
        _STATE[_N_ROWS // 8] = len(table)
        self.shown = table, messages


_WATCH = _Watch()


@contextmanager
def named_bus_errors(maps: Sequence[tuple[object, int, int]]) -> Iterator[None]:
    """While the block runs, a bus error in one of `maps` (file name, address, bytes) is fatal with
    a message on stderr and EXIT_STATUS; other bus errors go to the handler that was there before.

    For main programs: the handler is the process's.
    Does nothing on systems other than 64-bit Linux.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        yield
        return
    llvmlite.binding.add_symbol(_STATE_NAME, address_of(_STATE))
    for at, function in ((_WRITE, "write"), (_EXIT, "_exit"), (_SIGACTION, "sigaction")):
        _STATE[at // 8] = c_function(function)
    _STATE[_BEFORE // 8] = ctypes.addressof(_WATCH.before)
    _WATCH.add(maps)
    try:
        yield
    finally:
        _WATCH.remove(maps)


def _message(name: object) -> bytes:
    """One line whatever the name contains."""
    shown = str(name) if str(name).isprintable() else repr(str(name))
    text = f"{shown}: the file was cut short or cannot be read any more; start again\n"
    return text.encode(errors="backslashreplace")


def _sigaction(new: _SigAction, old: _SigAction | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = None if old is None else ctypes.byref(old)
    if libc.sigaction(_BUS_ERROR, ctypes.byref(new), pointer):
        raise OSError(ctypes.get_errno(), "sigaction")
