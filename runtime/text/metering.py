"""How much work and memory one template render may cause, and what each operation will cost.

Sizes are computed before a value is made wherever the value could be much larger than what it
is made from.  The unit is a character; an entry of a list counts as several.
"""

from __future__ import annotations

import contextvars
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.errors import TemplateError

ENTRY = 8
VISIT = 64  # looking at an entry takes the time of copying about this many characters
MAX_INTEGER_BITS = 1 << 14
MAX_FORMAT_FIELDS = 1000


class LimitExceeded(TemplateError):
    """A template used more time, steps or characters than a render may."""


@dataclass(frozen=True)
class Limits:
    """What one render may use: time, loop iterations plus calls, characters of all values."""

    seconds: float = 5.0
    steps: int = 2_000_000
    characters: int = 128 << 20


@dataclass
class Meter:
    """What one render has used; raises LimitExceeded at the first limit passed."""

    limits: Limits
    steps: int = 0
    characters: int = 0
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limits.seconds

    def step(self) -> None:
        """Count one loop iteration or call, and look at the clock."""
        self.steps += 1
        if self.steps > self.limits.steps:
            raise LimitExceeded(f"the chat template needs more than {self.limits.steps} steps")
        if time.monotonic() > self.deadline:
            raise LimitExceeded(f"the chat template ran for more than {self.limits.seconds} s")

    def charge(self, characters: int) -> None:
        """Count characters, before they exist where they could be many."""
        self.characters += characters
        if self.characters > self.limits.characters:
            raise LimitExceeded(
                f"the chat template makes more than {self.limits.characters} characters"
            )


_Result = TypeVar("_Result")
_METER: contextvars.ContextVar[Meter] = contextvars.ContextVar("template meter")


def metered(limits: Limits, work: Callable[[], _Result]) -> _Result:
    """The result of `work()`, which compiles or renders a template, within `limits`."""
    token = _METER.set(Meter(limits))
    try:
        return work()
    finally:
        _METER.reset(token)


def meter() -> Meter:
    """The meter of the render that runs in this context."""
    return _METER.get()


def charged(value: Any) -> Any:
    """`value`, its own size counted."""
    if isinstance(value, str | list | tuple):
        meter().charge(weight(value))
    return value


def charged_deep(value: Any) -> Any:
    """`value`, everything inside it counted: what comparing or printing it costs.

    Shared parts count as often as they occur, so nested doubling is stopped here.
    """
    count = meter().charge
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            count(len(item))
        elif isinstance(item, list | tuple):
            count(VISIT * len(item))
            rest += item
        elif isinstance(item, dict):
            count(2 * VISIT * len(item))
            rest += item.keys()
            rest += item.values()
    return value


def text_of(value: Any) -> str:
    """`str(value)`, its size counted before it is made."""
    if type(value) is str:
        return value
    if isinstance(value, list | tuple | dict):
        charged_deep(value)
    return str(value)


def concat(parts: Iterable[Any]) -> str:
    """The texts joined; stops while they arrive when they become too many."""
    count = meter().charge
    texts: list[str] = []
    for part in parts:
        text = text_of(part)
        count(len(text) + 1)
        texts.append(text)
    return "".join(texts)


class Iterations:
    """An iterable whose items are counted as steps; keeps its length for `loop.length`."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        step = meter().step
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def weight(value: str | list[Any] | tuple[Any, ...]) -> int:
    """The size of a value without what its entries refer to."""
    return len(value) if isinstance(value, str) else ENTRY * len(value)


def size_of_operation(operator: str, left: Any, right: Any) -> int:
    """The size the result of `left operator right` will have, for + * ** and %.

    Raises: TemplateError for integers that would become huge, and for % formats not allowed.
    """
    if operator == "%":
        return size_of_percent(left, right) if isinstance(left, str) else 1
    if operator == "+":
        both = isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        return weight(left) + weight(right) if both else 1
    if isinstance(left, int) and isinstance(right, int):
        power = operator == "**"
        bits = (
            left.bit_length() * max(right, 1) if power else left.bit_length() + right.bit_length()
        )
        if bits > MAX_INTEGER_BITS:
            raise TemplateError("the chat template computes with huge integers")
        return 1
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            return weight(value) * max(times, 0)
    return 1


_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*\d{0,3}(?:\.\d{0,3})?[diouxXeEfFgGcrsa%]")


def size_of_percent(text: str, values: Any) -> int:
    """The size of `text % values`; each field's width is at most 999."""
    if "%" in _PERCENT_FIELD.sub("", text):
        raise TemplateError("the chat template uses a % format that is not allowed")
    if isinstance(values, dict):
        values = tuple(values.values())
    return len(text) + text.count("%") * _longest(values if isinstance(values, tuple) else [values])


def size_of_format(text: str, values: Iterable[Any]) -> int:
    """The size of `text.format(*values)`; each field's width is at most 999."""
    try:
        fields = [
            f"{spec}{'!' if '[' in name or '.' in name else ''}"
            for _, name, spec, _ in string.Formatter().parse(text)
            if name is not None
        ]
    except ValueError as error:
        raise TemplateError(f"the chat template uses a bad format: {error}") from None
    risky = any(re.search(r"\d{4}|[{!]", field) for field in fields)
    if risky or len(fields) > MAX_FORMAT_FIELDS:
        raise TemplateError("the chat template uses a format that is not allowed")
    return len(text) + len(fields) * _longest(values)


def _longest(values: Iterable[Any]) -> int:
    return 1000 + max((len(text_of(value)) for value in values), default=0)


def size_of_replace(text: str, old: str, new: str, *_: Any) -> int:
    """The size of `text.replace(old, new)`."""
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def size_of_split(text: str, separator: str | None = None, *_: Any) -> int:
    """The size of `text.split(separator)`: every piece is an object of its own."""
    pieces = text.count(separator) if separator else len(text) // 2
    return len(text) + 64 * pieces


def size_of_join(separator: str, items: list[Any]) -> int:
    """The size of `separator.join(items)`."""
    return sum(len(item) + len(separator) for item in items if isinstance(item, str))


def deep_size_first(container: Any, *_: Any) -> int:
    """For methods that compare entries: counts the whole container, adds nothing more."""
    charged_deep(container)
    return 0
