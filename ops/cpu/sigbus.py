"""A bus error while reading a mapped file ends the process with one line that names the file.

The kernel raises it when a file became shorter than its map or the medium fails.  The fault may
hit a compiled kernel's thread, where no Python can run: so the handler is compiled too, and does
nothing but look up the address, write(2) a prepared message and _exit(2).
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cfunc, types

from ops.cpu.memory import call_i64, load_i64

EXIT_STATUS = 74
"""EX_IOERR of sysexits.h."""

_SI_ADDRESS = 16  # of siginfo_t on 64-bit Linux
_SA_SIGINFO = 4
_STDERR = 2
_ROW_BYTES = 32  # four int64: first address, end, message, length of the message


class _SigAction(ctypes.Structure):
    """struct sigaction of 64-bit Linux, glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def named_bus_errors(maps: Sequence[tuple[object, int, int]]) -> Iterator[None]:
    """While the block runs, a bus error in one of `maps` (file name, address, bytes) is fatal with
    a message on stderr and EXIT_STATUS; other bus errors go to the handler that was there before.

    For main programs: the handler is the process's.  Nested blocks must end in reverse order.
    Does nothing on systems other than 64-bit Linux.
    """
    if sys.platform != "linux" or sys.maxsize < 2**32:
        yield
        return
    messages = [ctypes.create_string_buffer(_message(name)) for name, _, _ in maps]
    rows = [
        (address, address + n_bytes, ctypes.addressof(message), len(message) - 1)
        for (_, address, n_bytes), message in zip(maps, messages, strict=True)
    ]
    table = np.array(rows, np.int64).reshape(-1, 4)
    before = _SigAction()
    handler = _compile_handler(table.ctypes.data, len(table), ctypes.addressof(before))
    ours = _SigAction(handler=handler.address, flags=_SA_SIGINFO)
    _sigaction(ours, before)
    try:
        yield
    finally:
        _sigaction(before, None)


def _message(name: object) -> bytes:
    """One line whatever the name contains."""
    shown = str(name) if str(name).isprintable() else repr(str(name))
    text = f"{shown}: the file was cut short or cannot be read any more; start again\n"
    return text.encode(errors="backslashreplace")


def _sigaction(new: _SigAction, old: _SigAction | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = None if old is None else ctypes.byref(old)
    if libc.sigaction(int(signal.SIGBUS), ctypes.byref(new), pointer):
        raise OSError(ctypes.get_errno(), "sigaction")


def _address_of(function: str) -> int:
    """Address of a function of the C library."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    if address is None:
        raise OSError(f"the C library has no {function}")
    return address


def _compile_handler(table: int, n_rows: int, before: int) -> Any:
    """The signal handler; the addresses of table, previous action and C functions are constants."""
    write, leave, sigaction = map(_address_of, ("write", "_exit", "sigaction"))
    bus_error, status = int(signal.SIGBUS), EXIT_STATUS

    @cfunc(types.void(types.int32, types.int64, types.int64))
    def on_bus_error(number, info, context):
        address = load_i64(info + _SI_ADDRESS)
        for i in range(n_rows):
            row = table + i * _ROW_BYTES
            if load_i64(row) <= address < load_i64(row + 8):
                call_i64(write, (_STDERR, load_i64(row + 16), load_i64(row + 24)))
                call_i64(leave, (status,))
        # Not ours: the fault happens again as soon as the previous handler is back.
        call_i64(sigaction, (bus_error, before, 0))

    return on_bus_error
