"""Which markup a model's answers have, told from its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.text.harmony import HarmonyParser
from runtime.text.reply_markup import ReplyParser, TagMarkup, TagParser
from runtime.text.tool_call_formats import (
    Reader,
    deepseek_marker,
    first_of,
    read_argument_tags,
    read_deepseek,
    read_function_tags,
    read_json,
    read_kimi,
    schemas_of,
)

THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
DEEPSEEK_CALLS = (deepseek_marker("tool calls begin"), deepseek_marker("tool calls end"))
KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

_CALLS: tuple[tuple[str, tuple[str, str], Reader], ...] = (
    (DEEPSEEK_CALLS[0], DEEPSEEK_CALLS, read_deepseek),
    (KIMI_CALLS[0], KIMI_CALLS, read_kimi),
    ("<arg_key>", TOOL_CALL, first_of(read_argument_tags, read_json)),
    ("<function=", TOOL_CALL, first_of(read_function_tags, read_json)),
    (TOOL_CALL[0], TOOL_CALL, first_of(read_json, read_function_tags)),
)
"""(what a template contains, the markers of a block of calls, how its text is read)."""


@dataclass(frozen=True)
class ReplyFormat:
    """The markup of one template.

    harmony        messages with headers; else tags
    think          markers of reasoning, None where the template knows none
    calls          markers and reader of tool calls, None likewise
    """

    harmony: bool
    think: tuple[str, str] | None
    calls: tuple[tuple[str, str], Reader] | None

    @property
    def is_plain(self) -> bool:
        """Whether answers are text and nothing else."""
        return not (self.harmony or self.think or self.calls)

    def parser(
        self,
        prompt_end: str,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        reasoning: bool,
    ) -> ReplyParser:
        """A parser for one answer.

        prompt_end  the last words of the prompt: it may end inside of reasoning
        tools       definitions whose calls are looked for; None: calls stay text
        reasoning   whether reasoning is told apart
        """
        if self.harmony:
            return HarmonyParser(calls=bool(tools))
        think = self.think if reasoning else None
        call, read = self.calls if self.calls and tools else (None, None)
        schemas = schemas_of(tools)
        markup = (
            TagMarkup(think, call)
            if read is None
            else TagMarkup(think, call, partial(_read, read, schemas))
        )
        inside = think is not None and prompt_end.rstrip().endswith(think[0])
        return TagParser(markup, thinking=inside)


def reply_format(template: str) -> ReplyFormat:
    """The format that goes with a chat template's source."""
    if "<|channel|>" in template and "<|message|>" in template:
        return ReplyFormat(True, None, None)
    calls = next(((tags, read) for mark, tags, read in _CALLS if mark in template), None)
    return ReplyFormat(False, THINK if THINK[1] in template else None, calls)


def _read(read: Reader, schemas: Mapping[str, Mapping[str, Any]], body: str) -> Any:
    return read(body, schemas)
