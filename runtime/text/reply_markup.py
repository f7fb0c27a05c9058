"""The markup in a model's answer, taken apart while it streams: reasoning, text, tool calls.

Whatever is not well-formed markup comes out as text, unchanged; white space beside a marker belongs
to the marker.  The parts do not depend on how the answer was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from runtime.text.overlap import overlap


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants called; `arguments` is JSON text."""

    name: str
    arguments: str


Part = Content | Reasoning | ToolCall


class ReplyParser(Protocol):
    """Parts of one answer, as far as its text has come."""

    def push(self, text: str) -> list[Part]:
        """The parts that have become certain with `text`."""
        ...

    def end(self) -> list[Part]:
        """What was held back; the answer has no more text."""
        ...


@dataclass(frozen=True)
class TagMarkup:
    """Markup of the kind `<think>..</think>text<tool_call>..</tool_call>`.

    think       opening and closing marker of reasoning; None: not looked for
    call        of a block of tool calls; None: not looked for
    read_calls  the calls in a block, or None where it is not well-formed (yet)
    """

    think: tuple[str, str] | None
    call: tuple[str, str] | None
    read_calls: Callable[[str], Sequence[ToolCall] | None] = lambda body: None


class _Mode(Enum):
    TEXT = auto()
    THINKING = auto()
    CALL = auto()


class TagParser:
    """The `ReplyParser` of a `TagMarkup`; `thinking`: the prompt ended inside of reasoning."""

    def __init__(self, markup: TagMarkup, *, thinking: bool = False) -> None:
        self._markup = markup
        self._mode = _Mode.THINKING if thinking and markup.think else _Mode.TEXT
        self._held = ""  # a marker's beginning, white space before one, or a block of calls
        self._after_marker = self._mode is _Mode.THINKING  # and nothing but white space since
        self._search = 0  # where in a block of calls its end may begin

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._mode is _Mode.CALL and self._markup.call is not None:
            calls = self._markup.read_calls(held)
            return [*calls] if calls else [Content(self._markup.call[0] + held)]
        parts: list[Part] = []
        self._emit(held, parts)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain from the held text; True if a marker was passed."""
        if self._mode is _Mode.CALL and self._markup.call is not None:
            return self._end_call(self._markup.call[1], parts)
        marker, at = _first(self._held, self._markers())
        before = self._held[:at].rstrip()
        self._emit(before, parts)
        if marker is None:
            self._held = self._held[len(before) :]
            return False
        self._held = self._held[at + len(marker) :]
        self._after_marker = True
        self._mode = self._mode_after(marker)
        return True

    def _markers(self) -> list[str]:
        think, call = self._markup.think, self._markup.call
        if self._mode is _Mode.THINKING:
            return [think[1]] if think else []
        return [pair[0] for pair in (think, call) if pair]

    def _mode_after(self, marker: str) -> _Mode:
        think = self._markup.think
        if self._mode is _Mode.THINKING:
            return _Mode.TEXT
        if think and marker == think[0]:
            return _Mode.THINKING
        self._search = 0
        return _Mode.CALL

    def _end_call(self, closing: str, parts: list[Part]) -> bool:
        """The calls of a block whose end has come; a marker inside of a value does not end it."""
        at = self._held.find(closing, self._search)
        if at < 0:
            self._search = max(self._search, len(self._held) - len(closing) + 1)
            return False
        calls = self._markup.read_calls(self._held[:at])
        if calls is None:
            self._search = at + len(closing)
            return True
        parts += calls
        self._held = self._held[at + len(closing) :]
        self._mode, self._after_marker = _Mode.TEXT, True
        return True

    def _emit(self, text: str, parts: list[Part]) -> None:
        if self._after_marker:
            text = text.lstrip()
        if text:
            parts.append(Reasoning(text) if self._mode is _Mode.THINKING else Content(text))
            self._after_marker = False


def _first(text: str, markers: Iterable[str]) -> tuple[str | None, int]:
    """(marker, where) of the first marker in `text`, the longest of several at one place; without
    one (None, where the longest possible beginning of one stands at the end)."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    if found:
        at, _, marker = min(found)
        return marker, at
    longest = max((overlap(text, marker) for marker in markers), default=0)
    return None, len(text) - longest
