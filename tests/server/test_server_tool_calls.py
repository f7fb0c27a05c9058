"""Reasoning and tool calls in chat answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import serving

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}assistant:"
    "{% if enable_thinking is defined %}<think>\n{% endif %}"
    "{% if false %}<think></think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nWait. {CALL}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "time?"}], "max_tokens": 200}


async def test_a_whole_answer() -> None:
    async with serving(chat_template=TEMPLATE) as served:
        served.say(ANSWER)
        status, body = await served.post("/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert status == 200
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "Wait."
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and len(call["id"]) == 32
    assert call["function"]["name"] == "now"
    assert json.loads(call["function"]["arguments"]) == {"zone": "UTC"}


async def test_a_stream_says_the_same() -> None:
    async with serving(chat_template=TEMPLATE) as served:
        served.say(ANSWER)
        *events, done = await served.events("/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert done == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "Wait."
    (call,) = [call for d in deltas for call in d.get("tool_calls", [])]
    assert call["index"] == 0 and call["function"]["name"] == "now"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("where", ["request", "server"])
async def test_reasoning_may_stay_in_the_content(where: str) -> None:
    settings = {"reasoning_format": "none"} if where == "server" else {}
    body = CHAT | ({"reasoning_format": "none"} if where == "request" else {})
    async with serving(chat_template=TEMPLATE, **settings) as served:
        served.say(ANSWER)
        _, answer = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ANSWER}
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_without_tools_a_call_is_text() -> None:
    async with serving(chat_template=TEMPLATE) as served:
        served.say(ANSWER)
        _, answer = await served.post("/v1/chat/completions", CHAT)
    message = answer["choices"][0]["message"]
    assert message["content"] == f"Wait. {CALL}" and "tool_calls" not in message


async def test_a_template_may_open_the_reasoning() -> None:
    body = CHAT | {"chat_template_kwargs": {"enable_thinking": True}}
    async with serving(chat_template=TEMPLATE) as served:
        served.say("hm\n</think>\n\nNoon.")
        _, answer = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Noon.")


async def test_a_call_that_is_cut_short_is_text() -> None:
    async with serving(chat_template=TEMPLATE) as served:
        served.say(ANSWER)
        body = CHAT | {"tools": TOOLS, "max_tokens": len(ANSWER) - 20}
        _, answer = await served.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].replace("Wait.", "", 1).strip() == CALL[:-20]
