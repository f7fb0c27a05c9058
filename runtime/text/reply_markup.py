"""The markup in a model's answer, taken apart while it streams: reasoning, text, tool calls.

Whatever is not well-formed markup comes out as text, unchanged; white space beside a marker belongs
to the marker.  The parts do not depend on how the answer was cut into pieces.
"""

from __future__ import annotations

import re
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

_NOTHING = re.compile(r"(?!)")


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
    read_calls  the calls in a block; empty where more text may complete it, None where none can
    no_call     what a block of calls cannot begin with
    may_end     whether a value of a block that is open at a place can end before another one
    bare        what may begin a block without its opening marker, and is part of it
    tells       whether reasoning comes out as such, else as text with its markers
    """

    think: tuple[str, str] | None
    call: tuple[str, str] | None
    read_calls: Callable[[str], Sequence[ToolCall] | None] = lambda body: None
    no_call: re.Pattern[str] = _NOTHING
    may_end: Callable[[str, int, int], bool] = lambda body, start, stop: True
    bare: tuple[str, ...] = ()
    tells: bool = True


class _Mode(Enum):
    TEXT = auto()
    THINKING = auto()
    CALL = auto()


@dataclass
class _Block:
    """A block of calls that has begun.

    opening  white space and the marker in front of it
    lead     what of the marker is part of the block
    search   where in the text after the marker its end may begin
    inside   what it interrupted, text or reasoning
    is_read  how far it has been read: a value of it is open there; 0: not yet
    """

    opening: str
    lead: str
    inside: _Mode
    search: int = 0
    is_read: int = 0


class TagParser:
    """The `ReplyParser` of a `TagMarkup`.

    thinking      the prompt ended inside of reasoning
    after_marker  with nothing but white space behind the marker that began it

    Reasoning may talk about calls: a call inside of it is one only where nothing but calls follows,
    since some models call without ending their reasoning.
    """

    def __init__(
        self, markup: TagMarkup, *, thinking: bool = False, after_marker: bool = False
    ) -> None:
        self._markup = markup
        self._mode = _Mode.THINKING if thinking and markup.think else _Mode.TEXT
        self._held = ""  # a marker's beginning, white space before one, or a block of calls
        self._after_marker = after_marker and markup.tells  # and only white space since
        self._block = _Block("", "", _Mode.TEXT)
        self._thought_calls: list[ToolCall] = []  # of the end of the reasoning so far
        self._thought_text = ""  # the same as text

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        while self._mode is _Mode.CALL:  # the end of its marker is missing
            calls = self._markup.read_calls(self._block.lead + self._held)
            if calls:
                self._take(calls, len(self._held), parts)
            else:
                self._refuse(parts)
            while self._step(parts):
                pass
        if self._thought_calls:
            return [*parts, *self._thought_calls]
        held, self._held = self._held, ""
        self._emit(held, parts)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain from the held text; True if a marker was passed."""
        if self._mode is _Mode.CALL and self._markup.call is not None:
            return self._end_call(self._markup.call[1], parts)
        marker, at = _first(self._held, self._markers())
        before = self._held[:at].rstrip()
        space = self._held[len(before) : at]
        if marker is None:
            self._emit(before, parts)
            self._held = self._held[len(before) :]
            return False
        self._held = self._held[at + len(marker) :]
        if marker not in (self._markup.think or ()):
            self._emit(before, parts)
            lead = marker if marker in self._markup.bare else ""
            self._block = _Block(space + marker, lead, self._mode)
            self._mode = _Mode.CALL
            return True
        self._emit(before if self._markup.tells else before + space + marker, parts)
        self._flush_thought(parts)
        self._after_marker = self._markup.tells
        self._mode = _Mode.TEXT if self._mode is _Mode.THINKING else _Mode.THINKING
        return True

    def _markers(self) -> list[str]:
        think, call, bare = self._markup.think, self._markup.call, self._markup.bare
        if self._mode is _Mode.THINKING:
            return [pair[i] for pair, i in ((think, 1), (call, 0)) if pair]
        return [*(pair[0] for pair in (think, call) if pair), *bare]

    def _end_call(self, closing: str, parts: list[Part]) -> bool:
        """The calls of a block whose end has come; a marker inside of a value does not end it."""
        block = self._block
        if not block.lead and self._markup.no_call.match(self._held):
            self._refuse(parts)
            return True
        at = self._held.find(closing, block.search)
        if at < 0:
            block.search = max(block.search, len(self._held) - len(closing) + 1)
            return False
        is_read, block.search = block.is_read, at + len(closing)
        block.is_read = block.search
        if is_read and not self._markup.may_end(self._held, is_read, at):
            return True  # as before: reading all of it with every marker would take forever
        calls = self._markup.read_calls(block.lead + self._held[:at])
        if calls:
            self._take(calls, block.search, parts)
        elif calls is None:
            self._refuse(parts)
        return True

    def _take(self, calls: Sequence[ToolCall], size: int, parts: list[Part]) -> None:
        """The running block is `calls` and ends with the first `size` held characters."""
        text, self._held = self._held[:size], self._held[size:]
        self._mode = self._block.inside
        if self._mode is _Mode.THINKING:
            self._thought_calls += calls
            self._thought_text += self._block.opening + text
        else:
            parts += calls
            self._after_marker = True

    def _refuse(self, parts: list[Part]) -> None:
        """The running block is none: its opening is text, and what follows is read again."""
        self._mode = self._block.inside
        self._emit(self._block.opening, parts)

    def _flush_thought(self, parts: list[Part]) -> None:
        """Calls that something followed were part of the reasoning."""
        text, self._thought_text = self._thought_text, ""
        self._thought_calls.clear()
        self._emit(text, parts)

    def _emit(self, text: str, parts: list[Part]) -> None:
        if text and self._thought_text:
            self._flush_thought(parts)
        if self._after_marker:
            text = text.lstrip()
        if text:
            tells = self._mode is _Mode.THINKING and self._markup.tells
            parts.append(Reasoning(text) if tells else Content(text))
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
