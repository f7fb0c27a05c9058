"""Addresses of C functions are those of the C library."""

from __future__ import annotations

import ctypes

import pytest

from ops.cpu.c_functions import c_function


def test_the_address_is_the_functions() -> None:
    absolute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(c_function("abs"))
    assert absolute(-7) == 7


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match="no such_function_anywhere"):
        c_function("such_function_anywhere")
