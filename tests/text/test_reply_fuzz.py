"""Answers put together from markers, calls, pieces of both and words: nothing is lost, nothing
depends on how they are cut, and calls have arguments that any client can read."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import NoReturn

import pytest

from runtime.text.reply_formats import DEEPSEEK_CALLS, KIMI_CALLS, reply_format
from runtime.text.reply_markup import Part, Reasoning, ToolCall
from runtime.text.tool_call_formats import deepseek_marker
from tests.support.reply_parts import parsed

N_ANSWERS = 400
PARAMETERS = {"properties": {"s": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
BEGIN, SEPARATOR, END = (
    deepseek_marker(words) for words in ("tool call begin", "tool sep", "tool call end")
)
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
HARMONY = (
    "<|start|>", "<|start|>assistant", "<|channel|>", "<|channel|>final", "<|channel|>analysis",
    "<|message|>", "<|end|>", "<|call|>", "<|return|>", " to=functions.f", "<|constrain|>json",
    "<|channel|>final<|message|>", "<|end|><|start|>assistant<|channel|>analysis<|message|>",
)  # fmt: skip
FUNCTION = ("<function=f>", "</function>", "<parameter=s>", "</parameter>")
ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f")

# Family: a template, its markers, and a call with a text and a JSON object to put in.
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": (
        "<think></think><tool_call>",
        (*THINK, *TOOL_CALL, '{"name": "f"}'),
        '<tool_call>\n{{"name": "f", "arguments": {json}}}\n</tool_call>',
    ),
    "coder": (
        "<tool_call><function=x>",
        (*TOOL_CALL, *FUNCTION),
        "<tool_call>\n<function=f>\n<parameter=s>\n{text}\n</parameter>\n<parameter=t>\n{text}\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "<think></think><tool_call><arg_key>",
        (*THINK, *TOOL_CALL, *ARGUMENT),
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    ),
    "deepseek": (
        "</think>" + DEEPSEEK_CALLS[0],
        (*THINK, *DEEPSEEK_CALLS, BEGIN, SEPARATOR, END),
        f"{DEEPSEEK_CALLS[0]}{BEGIN}f{SEPARATOR}{{json}}{END}{DEEPSEEK_CALLS[1]}",
    ),
    "kimi": (
        "</think>" + KIMI_CALLS[0],
        (*THINK, *KIMI_CALLS, *KIMI),
        f"{KIMI_CALLS[0]}{KIMI[0]}functions.f:0{KIMI[1]}{{json}}{KIMI[2]}{KIMI_CALLS[1]}",
    ),
    "harmony": (
        "<|channel|><|message|>",
        HARMONY,
        "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{json}<|call|>",
    ),
}
PROMPT_ENDS = {
    "harmony": ("<|end|><|start|>assistant", "<|channel|>final<|message|>Sure, ", "some words")
}

# Where a harmony message goes, not what it says.
HEADER_WORDS = re.compile(
    r"to=[^\s<]*(?:\s+\w+)?|<\|(?:start|channel|constrain)\|>(?:\s*(?!to=)\w+){0,2}"
)


class Answers:
    """Random answers of one family; every word in them is another one."""

    def __init__(self, family: str, seed: int) -> None:
        self._markers, self._call = FAMILIES[family][1:]
        self._random = random.Random(seed)
        self._n_words = 0

    def next(self) -> str:
        """A few pieces in a row."""
        return "".join(self._piece() for _ in range(self._random.randrange(1, 8)))

    def cuts(self, text: str) -> list[str]:
        """`text` in up to four pieces."""
        n = min(len(text), self._random.randrange(1, 4))
        ends = [0, *sorted(self._random.sample(range(len(text) + 1), n)), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(ends)]

    def _word(self) -> str:
        self._n_words += 1
        return f"W{self._n_words}é"

    def _piece(self) -> str:
        choose = self._random.choice
        kind = self._random.random()
        if kind < 0.3:
            return choose(("", " ", "\n")) + self._word() + choose(("", " ", "\n\n"))
        if kind < 0.6:
            return choose(self._markers)
        if kind < 0.75:
            marker = choose(self._markers)
            return marker[: self._random.randrange(len(marker) + 1)]
        return self._damaged(self._whole_call())

    def _whole_call(self) -> str:
        around = self._random.choice(("{}", "{}\n", '{}"\\', *(f"{{}}{m}" for m in self._markers)))
        text = around.replace("{}", self._word())
        body = json.dumps({"s": text}, ensure_ascii=self._random.random() < 0.5)
        return self._call.format(text=text, json=body)

    def _damaged(self, call: str) -> str:
        kind = self._random.random()
        at = self._random.randrange(len(call))
        if kind < 0.6:
            return call
        if kind < 0.75:
            return call[:at]
        if kind < 0.85:
            return call[:at] + call[at + self._random.randrange(1, 12) :]
        return call[:at] + self._word() + call[at:]


def refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def shown(part: Part) -> str:
    """What a client sees of a part; the arguments of a call are read as strictly as can be."""
    if not isinstance(part, ToolCall):
        return part.text
    arguments = json.loads(part.arguments.encode(), parse_constant=refuse)
    assert isinstance(arguments, dict) and part.name.encode()
    return part.name + json.dumps(arguments, ensure_ascii=False)


def is_shown(word: str, text: str) -> bool:
    """As it is, or as JSON writes it."""
    return word in text or json.dumps(word)[1:-1] in text


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_and_cuts_do_not_matter(family: str, seed: int) -> None:
    markup = reply_format(FAMILIES[family][0])
    answers = Answers(family, seed)
    choose = random.Random(seed).choice
    for _ in range(N_ANSWERS):
        answer = answers.next()
        prompt_end = choose(PROMPT_ENDS.get(family, ("", "<think>\n")))
        tools, reasoning = choose((TOOLS, TOOLS, None)), choose((True, True, False))

        def parts(pieces: list[str]) -> list[Part]:
            parser = markup.parser(prompt_end, tools, reasoning=reasoning)  # noqa: B023
            return parsed(parser, pieces)

        whole = parts([answer])
        assert parts([*answer]) == whole, answer
        assert parts(answers.cuts(answer)) == whole, answer
        text = "".join(map(shown, whole))
        for word in re.findall(r"W\d+é", HEADER_WORDS.sub("", answer)):
            assert is_shown(word, text), (word, answer)
        kinds = {type(part) for part in whole}
        assert tools or ToolCall not in kinds
        assert reasoning or Reasoning not in kinds
