"""The harmony format of gpt-oss: messages with a header that says where they go.

`<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text`;
`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{..}<|call|>` is a tool call.
An answer begins after `<|start|>assistant`.
"""

from __future__ import annotations

import re

from runtime.text.overlap import overlap
from runtime.text.reply_markup import Content, Part, Reasoning, ToolCall

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """The `ReplyParser` of harmony; calls: whether tool calls are looked for."""

    def __init__(self, *, calls: bool) -> None:
        self._calls = calls
        self._header = ""  # text since the last message; of the running one once it has begun
        self._in_message = False
        self._held = ""

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if not self._in_message:
            return self._stray(held)
        if self._recipient:
            return [self._call(held)]
        return self._text(held)

    def _step(self, parts: list[Part]) -> bool:
        if not self._in_message:
            header, marker, rest = self._held.partition(MESSAGE)
            if not marker:
                return False
            self._header, self._held, self._in_message = header, rest, True
            return True
        found = [at for end in ENDS if (at := self._held.find(end)) >= 0]
        if found:
            body, self._held = self._held[: min(found)], self._held[min(found) :]
            parts += [self._call(body)] if self._recipient else self._text(body)
            self._in_message = False
            return True
        if not self._recipient:
            certain = len(self._held) - max(overlap(self._held, end) for end in ENDS)
            parts += self._text(self._held[:certain])
            self._held = self._held[certain:]
        return False

    @property
    def _recipient(self) -> str | None:
        """The function that the running message calls."""
        match = _RECIPIENT.search(self._header) if self._calls else None
        return None if match is None else match[1]

    def _text(self, text: str) -> list[Part]:
        if not text:
            return []
        channel = _CHANNEL.search(self._header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        return [Reasoning(text) if is_reasoning else Content(text)]

    def _call(self, body: str) -> Part:
        return ToolCall(self._recipient or "", body.strip() or "{}")

    def _stray(self, text: str) -> list[Part]:
        """What stands outside of messages: markers alone say nothing, anything else is text."""
        rest = text
        for marker in (*ENDS, MESSAGE):
            rest = rest.replace(marker, "")
        return [Content(text)] if rest.strip() not in ("", "assistant") else []
