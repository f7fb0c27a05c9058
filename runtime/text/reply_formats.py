"""Which markup a model's answers have, told from its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.text.harmony import HarmonyParser
from runtime.text.reply_markup import ReplyParser, TagMarkup, TagParser
from runtime.text.tool_call_formats import (
    ARGUMENT_END,
    PARAMETER_END,
    STRING_END,
    Reader,
    deepseek_marker,
    first_of,
    may_end,
    read_argument_tags,
    read_bare_function_tags,
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


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    mark     what a template contains that asks for them so
    tags     the markers of a block of calls
    read     how the text of a block is read
    no_call  what it cannot begin with
    ends     what ends a value where a block is no JSON
    bare     what of a function's name begins a block whose opening marker is left out
    """

    mark: str
    tags: tuple[str, str]
    read: Reader
    no_call: str
    ends: re.Pattern[str] = STRING_END
    bare: str | None = None


# Tried with every piece of an answer, therefore bounded and without ways back.
_NO_MARKER = r"\s{0,64}+[^<]"
_NO_NAME = r"\s{0,64}+(?:\s|[^\s<{\[]{1,256}+(?:\s++)?[^\s<])"
_NO_TAG = r"\s{0,64}+[^<{\[]"
_CALLS = (
    CallFormat(DEEPSEEK_CALLS[0], DEEPSEEK_CALLS, read_deepseek, _NO_MARKER),
    CallFormat(KIMI_CALLS[0], KIMI_CALLS, read_kimi, _NO_MARKER),
    CallFormat(
        "<arg_key>", TOOL_CALL, first_of(read_argument_tags, read_json), _NO_NAME, ARGUMENT_END
    ),
    CallFormat(
        ">value_1</parameter>",
        TOOL_CALL,
        first_of(read_bare_function_tags, read_json),
        _NO_TAG,
        PARAMETER_END,
        bare="<function={}>",
    ),
    CallFormat(
        "<function=",
        TOOL_CALL,
        first_of(read_function_tags, read_json),
        _NO_TAG,
        PARAMETER_END,
        bare="<function={}>",
    ),
    CallFormat(
        TOOL_CALL[0], TOOL_CALL, first_of(read_json, read_function_tags), _NO_TAG, PARAMETER_END
    ),
)


@dataclass(frozen=True)
class ReplyFormat:
    """The markup of one template.

    harmony        messages with headers; else tags
    think          markers of reasoning, None where the template knows none
    calls          how tool calls are written, None likewise
    """

    harmony: bool
    think: tuple[str, str] | None
    calls: CallFormat | None

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
        said: str = "",
    ) -> ReplyParser:
        """A parser for one answer.

        prompt_end  the last words of the prompt: it may end inside of reasoning
        tools       definitions whose calls are looked for; None: calls stay text
        reasoning   whether reasoning is told apart
        said        the text that the answer continues
        """
        if self.harmony:
            return HarmonyParser(prompt_end, calls=bool(tools), reasoning=reasoning)
        schemas = schemas_of(tools)
        think = self.think or ("", "")
        opened = self.think is not None and prompt_end.rstrip().endswith(think[0])
        inside = self.think is not None and said.rfind(think[0]) > said.rfind(think[1])
        if self.calls is None or not tools:
            markup = TagMarkup(self.think, None, tells=reasoning)
        else:
            # Models that do not think leave out the marker at times.
            bare = self.calls.bare if self.think is None else None
            markup = TagMarkup(
                self.think,
                self.calls.tags,
                partial(_read, self.calls.read, schemas),
                re.compile(self.calls.no_call),
                partial(may_end, self.calls.ends),
                tuple(map(bare.format, schemas)) if bare else (),
                tells=reasoning,
            )
        return TagParser(markup, thinking=opened or inside, after_marker=opened)


def reply_format(template: str) -> ReplyFormat:
    """The format that goes with a chat template's source."""
    if "<|channel|>" in template and "<|message|>" in template:
        return ReplyFormat(True, None, None)
    calls = next((calls for calls in _CALLS if calls.mark in template), None)
    return ReplyFormat(False, THINK if THINK[1] in template else None, calls)


def _read(read: Reader, schemas: Mapping[str, Mapping[str, Any]], body: str) -> Any:
    return read(body, schemas)
