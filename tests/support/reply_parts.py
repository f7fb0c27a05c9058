"""What a parser makes of an answer, told in as few parts as possible."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.text.reply_markup import Content, Part, Reasoning, ReplyParser


def parsed(parser: ReplyParser, pieces: Iterable[str]) -> list[Part]:
    """The parts of an answer that comes in `pieces`; neighbouring texts of one kind joined."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.end()
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined
