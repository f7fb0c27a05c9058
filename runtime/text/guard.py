"""Keeps the words of a conversation from turning into control tokens.

A rendered template is tokenized with control tokens recognised, so a user who types
"<|im_end|>" would end his own turn.  Therefore the text of every control token inside a message
is broken up before rendering: GUARD goes in after its first character, and after the first
character of what could be the beginning of one at the end of a text (two texts put together must
not make one either).  `Tokenizer.encode(..., parse_special=True, guard=GUARD)` looks for control
tokens first and removes GUARD afterwards, so the model reads exactly what was typed, as text.

Every role is treated so; assistants too, whose text came out of the model without control tokens.
Only there, markup of reasoning and tool calls stays what it is, because templates look for it.
User-defined tokens (type 4) are not control tokens and stay tokens, as in any plain text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.errors import RequestError

GUARD = "\ufdd0"  # a noncharacter: Unicode reserves it for a program's own use

_ASSISTANT_MARKUP = re.compile("think|reason|tool|call|channel|message", re.IGNORECASE)
# What templates compare with; never a user's words.
_KEYS_LEFT_ALONE = frozenset(("role", "type"))
_MAX_DEPTH = 64


def without_guard(text: str) -> str:
    """Rendered text as a person should see it."""
    return text.replace(GUARD, "")


class Guard:
    """Breaks up the texts of control tokens."""

    def __init__(self, controls: Iterable[str]) -> None:
        controls = [text for text in controls if len(text) > 1]
        self._everyone = _Breaker(controls)
        self._assistant = _Breaker([t for t in controls if not _ASSISTANT_MARKUP.search(t)])

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of one chat message with every text in it broken up."""
        breaker = self._assistant if message.get("role") == "assistant" else self._everyone
        return dict(_guarded(message, breaker))

    def value(self, value: Any) -> Any:
        """A copy of a tool definition or template argument with every text broken up."""
        return _guarded(value, self._everyone)

    def text(self, text: str) -> str:
        """One text broken up."""
        return self._everyone(text)


class _Breaker:
    def __init__(self, controls: list[str]) -> None:
        longest_first = sorted(controls, key=len, reverse=True)
        # Looking ahead without taking anything finds occurrences that overlap, too.
        self._start = re.compile(f"(?={'|'.join(map(re.escape, longest_first))})")
        self._exists = bool(controls)
        self._longest = max(map(len, controls), default=0)
        # Beginnings that are letters would make ordinary words suspicious.
        self._beginnings = {
            text[:n] for text in controls if not text[0].isalnum() for n in range(1, len(text))
        }

    def whole(self, text: str) -> str:
        """`text` with every complete control token broken up."""
        return _insert(text, self._starts(text)) if self._exists else text

    def __call__(self, text: str) -> str:
        """`text` with every control token broken up, also what may be the beginning of one."""
        if not self._exists:
            return text
        endings = {
            len(text) - n
            for n in range(1, min(len(text), self._longest - 1) + 1)
            if text[-n:] in self._beginnings
        }
        return _insert(text, self._starts(text) | endings)

    def _starts(self, text: str) -> set[int]:
        return {match.start() for match in self._start.finditer(text)}


def _insert(text: str, positions: set[int]) -> str:
    """`text` with GUARD after the character at each position."""
    if not positions:
        return text
    cuts = [0, *(position + 1 for position in sorted(positions)), len(text)]
    return GUARD.join(text[a:b] for a, b in itertools.pairwise(cuts))


def _guarded(value: Any, breaker: _Breaker, depth: int = 0) -> Any:
    if isinstance(value, str):
        return breaker(value)
    if depth > _MAX_DEPTH:
        raise RequestError("messages", f"is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {
            breaker.whole(key) if isinstance(key, str) else key: (
                item
                if key in _KEYS_LEFT_ALONE and isinstance(item, str)
                else _guarded(item, breaker, depth + 1)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded(item, breaker, depth + 1) for item in value]
    return value
