"""Values that callers gave, shown in the errors about them, and the checks that several share."""

from __future__ import annotations

import reprlib
from typing import TypeGuard

from runtime.errors import RequestError

LONGEST_BITS = 128
"""Of a whole number that is written out: Python refuses to write very long ones."""


class _Short(reprlib.Repr):
    """`repr`, never long, never expensive, never raising."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 2

    def repr_int(self, value: int, level: int) -> str:
        return "a huge number" if value.bit_length() > LONGEST_BITS else repr(value)


shown = _Short().repr
"""A value for an error message."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that is not NaN; `True` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def check_flags(**flags: object) -> None:
    """Raises: RequestError where one is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RequestError(name, f"{shown(value)}: use True or False")
