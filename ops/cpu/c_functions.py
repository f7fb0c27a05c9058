"""Addresses of functions of the C library, which compiled code calls."""

from __future__ import annotations

import ctypes


def c_function(name: str) -> int:
    """The function's address.  Raises: OSError if this C library does not have it."""
    function = getattr(ctypes.CDLL(None), name, None)
    address = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
    if address is None:
        raise OSError(f"the C library has no {name}")
    return address
