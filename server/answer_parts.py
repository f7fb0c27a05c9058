"""An answer's reasoning, text and tool calls as OpenAI's clients want them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.text.reply_markup import Content, Part, Reasoning, ReplyParser, ToolCall

Json = dict[str, object]
ID_CHARACTERS = string.ascii_letters + string.digits

MakeParser = Callable[[], ReplyParser]


class PlainParser:
    """Everything is text."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        return []


@dataclass
class AnswerParts:
    """One answer taken apart as it comes."""

    parser: ReplyParser
    n_calls: int = 0
    message: Json = field(default_factory=lambda: {"role": "assistant", "content": ""})

    def push(self, text: str, *, is_last: bool) -> list[Json]:
        """The deltas that `text` makes certain; `message` grows by them."""
        parts = self.parser.push(text)
        if is_last:
            parts = [*parts, *self.parser.end()]
        return [self._delta(part) for part in parts]

    def finish_reason(self, reason: str | None) -> str | None:
        """`tool_calls` where the model stopped after asking for some."""
        return "tool_calls" if reason == "stop" and self.n_calls else reason

    def _delta(self, part: Part) -> Json:
        if isinstance(part, ToolCall):
            return {"tool_calls": [{"index": self._add_call(part)} | self._calls()[-1]]}
        name = "reasoning_content" if isinstance(part, Reasoning) else "content"
        self.message[name] = f"{self.message.get(name, '')}{part.text}"
        return {name: part.text}

    def _add_call(self, call: ToolCall) -> int:
        identifier = "".join(secrets.choice(ID_CHARACTERS) for _ in range(32))
        function = {"name": call.name, "arguments": call.arguments}
        self._calls().append({"id": identifier, "type": "function", "function": function})
        self.n_calls += 1
        return self.n_calls - 1

    def _calls(self) -> list[Json]:
        calls = self.message.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        return calls


def finished(parser: ReplyParser, text: str) -> AnswerParts:
    """A whole answer, taken apart at once."""
    parts = AnswerParts(parser)
    parts.push(text, is_last=True)
    if parts.n_calls and not parts.message["content"]:
        parts.message["content"] = None
    return parts
