"""Reasoning and tool calls in answers: what each family writes, cut anywhere, and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from runtime.text.reply_formats import DEEPSEEK_CALLS, KIMI_CALLS, reply_format
from runtime.text.reply_markup import Content, Part, Reasoning, ToolCall
from runtime.text.tool_call_formats import deepseek_marker

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = {"city": "Oslo </tool_call> 12", "days": 3}

HERMES = "{% for %}<think></think><tool_call>"
CODER = "<tool_call><function=x><think></think>"
GLM = "<tool_call><arg_key><think></think>"
DEEPSEEK = DEEPSEEK_CALLS[0] + "</think>"
KIMI = KIMI_CALLS[0] + "<think></think>"
HARMONY = "<|start|><|channel|><|message|>"

CALL_JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS})
BEGIN, SEPARATOR, END = (
    deepseek_marker(words) for words in ("tool call begin", "tool sep", "tool call end")
)

ANSWERS: dict[str, tuple[str, str]] = {
    "hermes": (
        HERMES,
        f"<think>\nI wonder.\n</think>\n\nLet me look.\n<tool_call>\n{CALL_JSON}\n</tool_call>\n"
        f"<tool_call>\n{CALL_JSON}\n</tool_call>",
    ),
    "coder": (
        CODER,
        "<think>\nI wonder.\n</think>\n\nLet me look.\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nOslo </tool_call> 12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\n"
        "Oslo </tool_call> 12\n</parameter>\n<parameter=days>3</parameter>\n</function>"
        "</tool_call>",
    ),
    "glm": (
        GLM,
        "<think>I wonder.</think>\nLet me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo </tool_call> 12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
        "</arg_value>\n</tool_call>\n<tool_call>weather<arg_key>city</arg_key><arg_value>"
        "Oslo </tool_call> 12</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>"
        "</tool_call>",
    ),
    "deepseek": (
        DEEPSEEK,
        f"<think>I wonder.</think>Let me look.{DEEPSEEK_CALLS[0]}{BEGIN}weather{SEPARATOR}"
        f"{json.dumps(ARGUMENTS)}{END}{BEGIN}function{SEPARATOR}weather\n```json\n"
        f"{json.dumps(ARGUMENTS)}\n```{END}{DEEPSEEK_CALLS[1]}",
    ),
    "kimi": (
        KIMI,
        f"<think>I wonder.</think>Let me look.{KIMI_CALLS[0]}<|tool_call_begin|>"
        f"functions.weather:0<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|>"
        "<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>"
        f"{json.dumps(ARGUMENTS)}<|tool_call_end|>{KIMI_CALLS[1]}",
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        f"{json.dumps(ARGUMENTS)}",
    ),
}


def parts_of(
    template: str,
    pieces: Iterable[str],
    *,
    prompt_end: str = "",
    tools: Sequence[dict[str, Any]] | None = TOOLS,
    reasoning: bool = True,
) -> list[Part]:
    """The parts of an answer; neighbouring texts of one kind joined."""
    parser = reply_format(template).parser(prompt_end, tools, reasoning=reasoning)
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


@pytest.mark.parametrize("family", ANSWERS)
def test_reasoning_text_and_calls(family: str) -> None:
    reasoning, text, *calls = parts_of(ANSWERS[family][0], [ANSWERS[family][1]])
    assert reasoning == Reasoning("I wonder.")
    assert text == Content("Let me look.")
    assert len(calls) == 2
    for call in calls:
        assert isinstance(call, ToolCall)
        assert call.name == "weather"
        assert json.loads(call.arguments) == ARGUMENTS


@pytest.mark.parametrize("family", ANSWERS)
def test_the_parts_do_not_depend_on_the_cuts(family: str) -> None:
    template, answer = ANSWERS[family]
    whole = parts_of(template, [answer])
    for cut in range(1, len(answer)):
        assert parts_of(template, [answer[:cut], answer[cut:]]) == whole, cut
    assert parts_of(template, answer) == whole


@pytest.mark.parametrize("family", ANSWERS)
def test_broken_answers_lose_no_word_and_do_not_depend_on_the_cuts(family: str) -> None:
    template, answer = ANSWERS[family]
    random_ = random.Random(7)
    for _ in range(120):
        first, last = sorted(random_.sample(range(len(answer)), 2))
        broken = (
            answer[:first] + random_.choice(("", "WORD", "<", "</", answer[3:9])) + answer[last:]
        )
        whole = parts_of(template, [broken])
        assert parts_of(template, broken) == whole, broken
        shown = "".join(
            part.name + part.arguments if isinstance(part, ToolCall) else part.text
            for part in whole
        )
        for word in ("wonder", "Let", "look", "Oslo", "WORD"):
            assert shown.count(word) == broken.count(word) or is_in_header(broken, word), broken


def is_in_header(broken: str, word: str) -> bool:
    """Words that stand in a harmony message's header, or in a call of unquoted arguments twice."""
    return "<|message|>" in broken


@pytest.mark.parametrize("text", ["Hello", "  two spaces", "a < b </", "<tool", "", "line\n"])
@pytest.mark.parametrize("template", [HERMES, GLM, DEEPSEEK, HARMONY, "plain"])
def test_plain_answers_stay_as_they_are(template: str, text: str) -> None:
    assert "".join(part.text for part in parts_of(template, text)) == text  # type: ignore[union-attr]


def test_a_prompt_may_end_inside_of_reasoning() -> None:
    parts = parts_of(HERMES, ["so it is</think>\n\nYes."], prompt_end="assistant\n<think>\n")
    assert parts == [Reasoning("so it is"), Content("Yes.")]
    parts = parts_of(HERMES, ["Yes."], prompt_end="<think>\n\n</think>\n\n")
    assert parts == [Content("Yes.")]


def test_nothing_is_told_apart_unless_it_is_wanted() -> None:
    template, answer = ANSWERS["hermes"]
    assert parts_of(template, [answer], tools=None, reasoning=False) == [Content(answer)]
    reasoning, text = parts_of(template, [answer], tools=None)
    assert isinstance(reasoning, Reasoning)
    assert isinstance(text, Content) and text.text.endswith("</tool_call>")


def test_values_follow_the_schema() -> None:
    answer = (
        "<tool_call><function=weather><parameter=city>12</parameter>"
        "<parameter=days>[1, 2]</parameter><parameter=other>x y</parameter></function></tool_call>"
    )
    (call,) = parts_of(CODER, [answer])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"city": "12", "days": [1, 2], "other": "x y"}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "weather", "arguments": {"city": }}',
        '{"arguments": {}}',
        "[" * 100_000,
        '{"name": 3}',
        "null",
        "",
    ],
)
def test_malformed_calls_stay_text(body: str) -> None:
    answer = f"<tool_call>{body}</tool_call>"
    assert parts_of(HERMES, [answer]) == [Content(answer)]
