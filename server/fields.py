"""Typed reading of a JSON object: every wrong type is a `RequestError` that names the field.

`null` means absent, unknown fields are never looked at, and a field may have several names of which
the first one present counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from runtime.errors import RequestError


class Fields:
    """One JSON object, read field by field."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self._values = values
        self._where = where

    def raw(self, *names: str) -> object | None:
        """The first of `names` that is present and not null."""
        return self._find(names)[1]

    def text(self, *names: str) -> str | None:
        name, value = self._find(names)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "must be a string", value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "must be true or false", value)

    def integer(
        self, *names: str, low: int | None = None, high: int | None = None, clamp: bool = False
    ) -> int | None:
        """A whole number (5.0 counts too) within [low, high]; outside it is clamped or refused."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "must be a whole number", value)
        if clamp:
            value = value if low is None else max(low, value)
            return value if high is None else min(high, value)
        if (low is not None and value < low) or (high is not None and value > high):
            raise self.wrong(name, f"must be {_range(low, high)}", value)
        return value

    def number(
        self, *names: str, low: float | None = None, high: float | None = None, clamp: bool = False
    ) -> float | None:
        """A finite number within [low, high]; outside it is clamped or refused."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "must be finite", "a number beyond the range of floats")
        if clamp:
            number = number if low is None else max(low, number)
            return number if high is None else min(high, number)
        if (low is not None and number < low) or (high is not None and number > high):
            raise self.wrong(name, f"must be {_range(low, high)}", value)
        return number

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.text(name)
        if value is None or value in allowed:
            return value
        raise self.wrong(name, f"must be one of {', '.join(allowed)}", value)

    def items(self, name: str, *, limit: int) -> list[object] | None:
        """A list of at most `limit` entries."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "must be a list", value)
        if len(value) > limit:
            raise RequestError(
                self._path(name), f"has {len(value)} entries; at most {limit} are accepted"
            )
        return value

    def nested(self, name: str) -> Fields | None:
        """A nested JSON object."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "must be an object", value)
        return Fields(value, self._path(name))

    def mapping(self, name: str) -> dict[str, object] | None:
        """A nested JSON object as it is."""
        nested = self.nested(name)
        return None if nested is None else dict(nested._values)

    def wrong(self, name: str, rule: str, value: object) -> RequestError:
        """The error for a field that breaks `rule`, quoting a bounded piece of what was sent."""
        return wrong_type(self._path(name), rule, value)

    def _find(self, names: tuple[str, ...]) -> tuple[str, object | None]:
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def wrong_type(path: str, rule: str, value: object) -> RequestError:
    """The error for the value at `path` that breaks `rule`, quoting a bounded piece of it."""
    return RequestError(path, f"{rule}, not {shown(value)}")


def shown(value: object) -> str:
    """`value` for an error message: short, on one line, never expensive to build."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"between {low} and {high}"
