"""Answers that go wrong in one place for long: reading them takes time in proportion."""

from __future__ import annotations

import time

import pytest

from runtime.text.reply_formats import reply_format

N_PIECES = 10_000
SECONDS = 3.0  # they take 0.1 s; with every piece tried on all of the text before, 5 s and more
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HARMONY = "<|channel|><|message|>"
CALL = "<|channel|>commentary to=functions.f json<|message|>"
GLM = "<think></think><tool_call><arg_key>"
HERMES = "<think></think><tool_call>"
QWEN = HERMES + "<function="


@pytest.mark.parametrize(
    ("template", "begin", "piece"),
    [
        (HARMONY, "", "abcd"),
        (HARMONY, " to=", "abcd"),
        (HARMONY, "<|channel|>", "abcd"),
        (HARMONY, "<|channel|>", " "),
        (HARMONY, CALL + '{"s": "', "abcd"),
        (GLM, "<tool_call>", "abcd"),
        (GLM, "<tool_call>f<arg_key>s</arg_key><arg_value>", "abcd"),
        (HERMES, "<tool_call>", " "),
        (HERMES, '<tool_call>{"name": "', "abcd"),
        (HERMES, "<think>", "<tool_call>{"),
        (HERMES, '<tool_call>{"name": "', "</tool_call>"),
        (QWEN, "<tool_call><function=f><parameter=a>", "</tool_call>"),
        (GLM, "<tool_call>f<arg_key>s</arg_key><arg_value>", "</tool_call>"),
        (HARMONY, "", "<|channel|>"),
    ],
)
def test_10000_pieces(template: str, begin: str, piece: str) -> None:
    parser = reply_format(template).parser("", TOOLS, reasoning=True)
    start = time.process_time()
    parser.push(begin)
    for _ in range(N_PIECES):
        parser.push(piece)
    parser.end()
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("unclosed", ["<parameter=a>", "<parameter=a>x</parameter>"])
def test_300_calls_that_break_off(unclosed: str) -> None:
    """Every one may be the value of the one before: 4 s where all is read with every marker."""
    parser = reply_format(QWEN).parser("", TOOLS, reasoning=True)
    text = 300 * f"<tool_call><function=f>{unclosed}</tool_call>"
    start = time.process_time()
    parts = [*parser.push(text), *parser.end()]
    assert time.process_time() - start < SECONDS / 3
    assert "".join(part.text for part in parts) == text  # type: ignore[union-attr]


def test_a_header_of_white_space_that_is_none() -> None:
    parser = reply_format(HARMONY).parser("", TOOLS, reasoning=True)
    text = "<|channel|>" + 2000 * " " + "!"
    start = time.process_time()
    parts = [*parser.push(text), *parser.end()]
    assert time.process_time() - start < SECONDS
    assert "".join(part.text for part in parts) == text  # type: ignore[union-attr]
