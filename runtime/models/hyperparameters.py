"""Typed, bounded reads of an architecture's numbers from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from runtime.errors import CorruptModel
from runtime.models.gguf_header import MetadataValue

MAX_COUNT = 1 << 31
MAX_NUMBER, MIN_POSITIVE = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""Of what kernels compute with; beyond them a file's f64 is infinite there, or zero."""


class Hyperparameters:
    """The keys `ARCHITECTURE.*` of one model; every error names the key and its value."""

    def __init__(
        self, path: Path, architecture: str, metadata: Mapping[str, MetadataValue]
    ) -> None:
        self.path = path
        self.architecture = architecture
        self.metadata = metadata

    def has(self, key: str) -> bool:
        return self._full(key) in self.metadata

    def count(
        self,
        key: str,
        default: int | None = None,
        at_least: int = 1,
        at_most: int = MAX_COUNT - 1,
    ) -> int:
        """A whole number of at least `at_least` and at most `at_most`."""
        value = self._value(key, default)
        if type(value) is not int or not at_least <= value <= at_most:
            limit = "" if at_most == MAX_COUNT - 1 else f" and at most {at_most}"
            raise self.wrong(key, f"use a whole number of at least {at_least}{limit}")
        return value

    def count_of_layer(
        self, key: str, layer: int, default: int | None = None, at_least: int = 1
    ) -> int:
        """A whole number that the file gives once for all layers or as an array of one a layer."""
        value = self._value(key, default)
        if isinstance(value, list):
            if layer >= len(value):
                raise self.wrong(key, f"has {len(value)} entries, layer {layer} has none")
            value = value[layer]
        if type(value) is not int or not at_least <= value < MAX_COUNT:
            raise self.wrong(key, f"use whole numbers of at least {at_least}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        return self._finite(key, self._value(key, None))

    def number_of_layer(self, key: str, layer: int, default: float) -> float:
        """A finite number, one for all layers or an array of one a layer."""
        value = self._value(key, default)
        if isinstance(value, list):
            if layer >= len(value):
                raise self.wrong(key, f"has {len(value)} entries, layer {layer} has none")
            value = value[layer]
        return self._finite(key, value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """An array of whole numbers from 0 to 2^64 - 1."""
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.wrong(key, "use an array of whole numbers")
        numbers = [n for n in value if type(n) is int and 0 <= n < 1 << 64]
        if len(numbers) != len(value):
            raise self.wrong(key, "use an array of whole numbers")
        return tuple(numbers)

    def flag_of_layer(self, key: str, layer: int) -> bool:
        """An entry of an array of one boolean, or 0 or 1, a layer."""
        value = self._value(key, None)
        if not isinstance(value, list) or layer >= len(value):
            raise self.wrong(key, f"use an array with an entry for layer {layer}")
        if value[layer] not in (0, 1):
            raise self.wrong(key, "use booleans, or 0 and 1")
        return bool(value[layer])

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "use a number")
        if not MIN_POSITIVE <= value <= MAX_NUMBER:
            raise self.wrong(key, "use a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "use a boolean")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "use a string")
        return value

    def wrong(self, key: str, what: str) -> CorruptModel:
        """The error that the value of `key` is impossible."""
        full = self._full(key)
        shown = repr(self.metadata.get(full))
        return CorruptModel(self.path, f"'{full}' is {shown[:60]}: {what}")

    def _finite(self, key: str, value: MetadataValue) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "use a number")
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise self.wrong(key, "use a finite number")
        return float(value)

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str, default: MetadataValue | None) -> MetadataValue:
        value = self.metadata.get(self._full(key), default)
        if value is None:
            raise CorruptModel(self.path, f"'{self._full(key)}' is missing")
        return value
