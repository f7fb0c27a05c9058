"""Reasoning and tool calls in answers: what each family writes, cut anywhere, and broken."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from runtime.text.reply_formats import DEEPSEEK_CALLS, KIMI_CALLS, reply_format
from runtime.text.reply_markup import Content, Part, Reasoning, ToolCall
from runtime.text.tool_call_formats import deepseek_marker
from tests.support.reply_parts import parsed

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
MIMO = CODER + "<parameter=example_parameter_1>value_1</parameter>"
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


# Names of recipients, roles, channels and types: where a harmony message goes, not what it says.
_HEADER_WORDS = re.compile(r"to=[^\s<]*|(?:<\|start\|>|<\|channel\|>|<\|constrain\|>)\s*\w*")


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
    return parsed(parser, pieces)


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
            needed = _HEADER_WORDS.sub("", broken).count(word)
            assert needed <= shown.count(word) <= broken.count(word), broken


@pytest.mark.parametrize("text", ["Hello", "  two spaces", "a < b </", "<tool", "", "line\n"])
@pytest.mark.parametrize("template", [HERMES, GLM, DEEPSEEK, HARMONY, "plain"])
def test_plain_answers_stay_as_they_are(template: str, text: str) -> None:
    assert "".join(part.text for part in parts_of(template, text)) == text  # type: ignore[union-attr]


def test_a_prompt_may_end_inside_of_reasoning() -> None:
    parts = parts_of(HERMES, ["so it is</think>\n\nYes."], prompt_end="assistant\n<think>\n")
    assert parts == [Reasoning("so it is"), Content("Yes.")]
    parts = parts_of(HERMES, ["Yes."], prompt_end="<think>\n\n</think>\n\n")
    assert parts == [Content("Yes.")]


def text_of(parts: Iterable[Part]) -> str:
    """The parts' text, calls left out."""
    return "".join(part.text for part in parts if not isinstance(part, ToolCall))


def test_calls_that_end_unfinished_reasoning() -> None:
    call = f"<tool_call>{CALL_JSON}</tool_call>"
    reasoning, *calls = parts_of(HERMES, [f"Hm.\n{call}\n{call}\n"], prompt_end="<think>\n")
    assert reasoning == Reasoning("Hm.")
    assert [type(call) for call in calls] == [ToolCall, ToolCall]
    talk = f"Maybe {call} or not."
    assert parts_of(HERMES, [talk], prompt_end="<think>") == [Reasoning(talk)]
    parts = parts_of(HERMES, [f"{call}\n</think>\nNo."], prompt_end="<think>")
    assert parts == [Reasoning(call), Content("No.")]


def test_reasoning_that_is_not_told_apart_has_no_calls() -> None:
    answer = f"<think>\n<tool_call>{CALL_JSON}</tool_call>\n</think>\n\nLet me look.\n"
    parts = parts_of(HERMES, [f"{answer}<tool_call>{CALL_JSON}</tool_call>"], reasoning=False)
    assert parts[0] == Content(answer.rstrip())
    assert isinstance(parts[1], ToolCall) and len(parts) == 2


def test_a_broken_call_hides_nothing_behind_it() -> None:
    good = f"<tool_call>{CALL_JSON}</tool_call>"
    for broken in ("<tool_call>{'name'}</tool_call>", '<tool_call>{"name": "x"', "<tool_call> is"):
        text, call = parts_of(HERMES, [f"So {broken} then {good}"])
        assert text == Content(f"So {broken} then")
        assert isinstance(call, ToolCall)


def test_words_about_calls_come_at_once() -> None:
    parser = reply_format(HERMES).parser("", TOOLS, reasoning=True)
    pushed = [*parser.push("Write <tool_call> around "), *parser.push("it, all of it.")]
    assert text_of(pushed) == "Write <tool_call> around it, all of it."


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
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({}, "[1]", [1]),
    ],
)
def test_one_value_by_its_schema(schema: dict[str, Any], text: str, value: object) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    answer = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    (call,) = parts_of(GLM, [answer], tools=[{"type": "function", "function": function}])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"x": value}


def test_values_may_hold_what_looks_like_their_end() -> None:
    value = "a</parameter>b</function>\n</tool_call>"
    answer = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    (call,) = parts_of(CODER, [answer])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"city": value}


def test_line_breaks_beside_values_are_the_format_s_or_the_value_s() -> None:
    answer = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    for template, value in ((CODER, "Oslo\n"), (MIMO, "\nOslo\n\n")):
        (call,) = parts_of(template, [answer])
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"city": value}


def test_models_that_do_not_think_may_leave_out_the_opening() -> None:
    answer = "Let me look.\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    for end in ("</tool_call>", ""):
        text, call = parts_of("<tool_call><function=x>", [answer + end])
        assert text == Content("Let me look.")
        assert isinstance(call, ToolCall)
    other = answer.replace("weather", "vector")
    assert parts_of("<tool_call><function=x>", [other]) == [Content(other)]


def test_half_a_character_in_an_escape_is_sent_as_an_escape() -> None:
    body = r'{"name": "weather", "arguments": {"city": "\ud83d", "days": "\u00e9"}}'
    (call,) = parts_of(HERMES, [f"<tool_call>{body}</tool_call>"])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments.encode()) == {"city": "\ud83d", "days": "\u00e9"}


@pytest.mark.parametrize("family", ["hermes", "deepseek", "kimi", "harmony"])
def test_arguments_nested_as_deep_as_python_reads_are_a_call_or_text(family: str) -> None:
    """At some depth they can be read and not written, at the next not even read."""
    n_calls = set()
    for depth in [*range(930, 1001), 200_000]:
        nested = depth * '{"a":' + "1" + depth * "}"
        text = ANSWERS[family][1].replace(json.dumps(ARGUMENTS), nested)
        assert nested in text
        calls = [
            part for part in parts_of(ANSWERS[family][0], [text]) if isinstance(part, ToolCall)
        ]
        n_calls.add(len(calls))
    assert n_calls >= {0, 2}


def test_several_objects_in_one_block_and_line_breaks_in_strings() -> None:
    body = f"{CALL_JSON}\n" + CALL_JSON.replace("Oslo ", "Oslo\n")
    first, second = parts_of(HERMES, [f"<tool_call>\n{body}\n</tool_call>"])
    assert isinstance(first, ToolCall) and isinstance(second, ToolCall)
    assert json.loads(second.arguments)["city"] == ARGUMENTS["city"].replace("Oslo ", "Oslo\n")  # type: ignore[attr-defined]


class TestHarmony:
    """What only headers can do."""

    CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

    @pytest.mark.parametrize("body", ['{"city": "Os', "Oslo", "[]", '{"days": NaN}'])
    @pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
    def test_arguments_that_are_no_object_stay_text(self, body: str, end: str) -> None:
        parts = parts_of(HARMONY, [self.CALL + body + end])
        assert text_of(parts).removesuffix(end) == self.CALL + body
        assert not any(isinstance(part, ToolCall) for part in parts)

    def test_markers_inside_of_strings(self) -> None:
        (call,) = parts_of(HARMONY, [self.CALL + '{"city": "<|end|>"}<|call|>'])
        assert call == ToolCall("weather", '{"city": "<|end|>"}')

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            ("Well, no.<|end|><|start|>assistant<|channel|>final<|message|>No.", "Well, no.No."),
            ("<|channel|>final<|message|>A.<|end|>So it is<|start|>assistant", "A.So it is"),
            ("The <|channel|> tag is one.", "The <|channel|> tag is one."),
            ("Yes<|channel|>final<|message|>No.", "YesNo."),
            ("Yes", "Yes"),
        ],
    )
    def test_words_outside_of_messages_are_text(self, answer: str, text: str) -> None:
        assert parts_of(HARMONY, answer) == [Content(text)]

    @pytest.mark.parametrize("cut", ["<|channel|>", "<|channel|>fin", "<|start|>assist"])
    def test_a_header_that_is_cut_short_says_nothing(self, cut: str) -> None:
        answer = f"<|channel|>analysis<|message|>I wonder.<|end|>{cut}"
        assert parts_of(HARMONY, [answer]) == [Reasoning("I wonder.")]

    def test_the_last_channel_counts(self) -> None:
        answer = "<|channel|>commentary to=assistant<|channel|>analysis<|message|>I wonder.<|end|>"
        assert parts_of(HARMONY, [answer]) == [Reasoning("I wonder.")]

    @pytest.mark.parametrize(
        ("prompt_end", "kind"),
        [
            ("<|start|>assistant<|channel|>final<|message|>Sure, ", Content),
            ("words of a message", Content),
            ("<|start|>assistant<|channel|>analysis<|message|>Hm", Reasoning),
            ("<|start|>assistant<|channel|>analysis", Content),
        ],
    )
    def test_a_prompt_may_end_inside_of_a_message(self, prompt_end: str, kind: type) -> None:
        parser = reply_format(HARMONY).parser(prompt_end, TOOLS, reasoning=True)
        assert parser.push("it is so.") == [kind("it is so.")]

    def test_a_prompt_may_begin_the_header(self) -> None:
        prompt_end = "<|end|><|start|>assistant<|channel|>analysis"
        parts = parts_of(HARMONY, ["<|message|>I wonder."], prompt_end=prompt_end)
        assert parts == [Reasoning("I wonder.")]

    def test_reasoning_that_is_not_told_apart_keeps_its_markers(self) -> None:
        reasoning = "<|channel|>analysis<|message|>I wonder.<|end|>"
        answer = f"{reasoning}<|start|>assistant<|channel|>final<|message|>So?"
        assert parts_of(HARMONY, [answer], reasoning=False) == [Content(f"{reasoning}So?")]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "weather", "arguments": {"city": }}',
        '{"name": "weather", "arguments": {"days": NaN}}',
        '{"name": "weather", "arguments": {"days": 1e999}}',
        '{"name": "weather", "argument": {"city": "Oslo"}}',
        r'{"name": "\ud83d", "arguments": {}}',
        '{"arguments": {}}',
        "[" * 100_000,
        '{"name": 3}',
        "null",
        "",
    ],
)
def test_malformed_calls_stay_text(body: str) -> None:
    answer = f"So: <tool_call>{body}</tool_call>"
    assert parts_of(HERMES, [answer]) == [Content(answer)]
