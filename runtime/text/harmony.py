"""The harmony format of gpt-oss: messages with a header that says where they go.

`<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text`;
`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{..}<|call|>` is a tool call.
An answer begins after `<|start|>assistant`, or inside of a message that the prompt has begun.
"""

from __future__ import annotations

import re

from runtime.text.overlap import overlap
from runtime.text.reply_markup import Content, Part, Reasoning
from runtime.text.tool_call_formats import read_object

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CHANNELS = ("analysis", "commentary", "final")
OVER = ("<|end|>", "<|call|>", "<|return|>")
ENDS = (*OVER, START, CHANNEL)
LONGEST_HEADER = 1024
"""Characters; more is text, so that reading it again with every piece stays cheap."""
_LONGEST = max(map(len, (*ENDS, MESSAGE)))
_END = re.compile("|".join(map(re.escape, ENDS)))
_HEADER_END = re.compile("|".join(map(re.escape, (*OVER, MESSAGE))) + r"|(?<=.)<\|start\|>", re.S)
_MARKER = re.compile(r"<\|\w+\|>")
# Every beginning of a header matches, too.  Tried with every piece of an answer, therefore bounded
# and without ways back.
_SPACE, _WORD, _TO = r"\s{0,16}+", r"(?:(?!to=)\w{1,64}+)?+", r"(?:to=[^\s<]{0,256}+)?+"
_HEADER = re.compile(
    rf"(?:<\|start\|>)?+{_SPACE}(?:assistant)?+{_SPACE}{_TO}{_SPACE}"
    rf"(?:<\|channel\|>{_SPACE}{_WORD}{_SPACE}{_TO}{_SPACE})*+"
    rf"(?:<\|constrain\|>)?+{_SPACE}{_WORD}{_SPACE}"
)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)\s*(\w+)")


class HarmonyParser:
    """The `ReplyParser` of harmony.

    prompt_end  the last words of the prompt
    calls       whether tool calls are looked for
    reasoning   whether reasoning comes out as such, else as text with its markers
    """

    def __init__(self, prompt_end: str = "", *, calls: bool, reasoning: bool = True) -> None:
        self._calls = calls
        self._tells = reasoning
        self._held = ""
        self._search = 0  # where in the held text of a call its end may begin
        self._lead = ""  # the beginning of the header that stands in the prompt
        self._in_message = False
        self._header = ""
        self._recipient: str | None = None  # the function that the running message calls
        self._is_reasoning = False
        self._begin(prompt_end)

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        while self._in_message and self._recipient:
            calls = read_object(self._recipient, self._held)
            if calls:
                return [*parts, *calls]
            self._refuse(parts)
            while self._step(parts):
                pass
        self._say(self._held, parts) if self._in_message else self._stray(self._held, parts)
        self._held = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take what is certain from the held text; True if a marker was passed."""
        if not self._in_message:
            return self._read_header(parts)
        end = _END.search(self._held, self._search)
        if self._recipient:
            return self._end_call(end, parts)
        if end is None:
            certain = len(self._held) - max(overlap(self._held, marker) for marker in ENDS)
            self._say(self._held[:certain], parts)
            self._held = self._held[certain:]
            return False
        self._say(self._held[: end.start()], parts)
        if self._is_reasoning and not self._tells and end[0] in OVER:
            parts.append(Content(end[0]))
        self._close(end.start())
        return True

    def _read_header(self, parts: list[Part]) -> bool:
        """Pass a message's header, or find out that there is none."""
        over = next((marker for marker in OVER if self._held.startswith(marker)), None)
        if over is not None:
            self._held, self._lead = self._held[len(over) :], ""
            return True
        end = _HEADER_END.search(self._held, 0, LONGEST_HEADER + _LONGEST)
        uncertain = max(overlap(self._held, marker) for marker in (*ENDS, MESSAGE, "<|constrain|>"))
        header = self._held[: end.start() if end else len(self._held) - uncertain]
        if len(header) > LONGEST_HEADER or not _HEADER.fullmatch(self._lead + header):
            marker = _MARKER.match(header)  # which would end the text at once
            self._open("")
            if marker is not None:
                parts.append(Content(marker[0]))
                self._held = self._held[marker.end() :]
            return True
        if end is None:
            return False
        if end[0] == MESSAGE:
            if header.strip() not in CHANNELS:
                self._stray(header, parts)
            self._held = self._held[end.end() :]
            self._open(self._lead + header)
            if self._is_reasoning and not self._tells:
                parts.append(Content(header + MESSAGE))
        else:
            self._stray(header, parts)
            self._held = self._held[end.start() :]
        self._lead = ""
        return True

    def _begin(self, prompt_end: str) -> None:
        """Before the answer: inside of a message, in its header, or before one."""
        markers = [*_MARKER.finditer(prompt_end)]
        if markers and markers[-1][0] != MESSAGE:
            lead = prompt_end[max(prompt_end.rfind(START), 0) :]
            self._lead = lead if _HEADER.fullmatch(lead) else ""
        elif prompt_end:
            header = prompt_end[: markers[-1].start()] if markers else ""
            self._open(header[max(header.rfind(START), 0) :])

    def _open(self, header: str) -> None:
        recipient = _RECIPIENT.search(header) if self._calls else None
        channels = _CHANNEL.findall(header)
        self._in_message, self._header, self._search = True, header, 0
        self._recipient = None if recipient is None else recipient[1]
        self._is_reasoning = bool(channels) and channels[-1] == "analysis"

    def _close(self, size: int) -> None:
        self._held = self._held[size:]
        self._in_message, self._search = False, 0

    def _end_call(self, end: re.Match[str] | None, parts: list[Part]) -> bool:
        """The call of a message whose end has come; a marker inside of a string does not end it."""
        if end is None:
            self._search = max(self._search, len(self._held) - _LONGEST + 1)
            return False
        calls = read_object(self._recipient or "", self._held[: end.start()])
        self._search = end.end()
        if calls:
            parts += calls
            self._close(end.start())
        elif calls is None:
            self._refuse(parts)
        return True

    def _refuse(self, parts: list[Part]) -> None:
        """The running message is no call: it is text with its header."""
        parts.append(Content(self._header.removeprefix(START + "assistant") + MESSAGE))
        self._recipient, self._is_reasoning, self._search = None, False, 0

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            tells = self._is_reasoning and self._tells
            parts.append(Reasoning(text) if tells else Content(text))

    def _stray(self, header: str, parts: list[Part]) -> None:
        """A header without a message says nothing, a word alone is text."""
        is_word = not _MARKER.search(header) and "to=" not in header
        if is_word and header.strip() not in ("", "assistant"):
            parts.append(Content(header))
