"""Reasoning and tool calls in chat answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import serving

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}assistant:"
    "{% if opened is defined %}<think>\n{% endif %}"
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
    body = CHAT | {"chat_template_kwargs": {"opened": True}}
    async with serving(chat_template=TEMPLATE) as served:
        served.say("hm\n</think>\n\nNoon.")
        _, answer = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Noon.")


@pytest.mark.parametrize(
    ("settings", "fields", "thinks"),
    [
        ({}, {}, True),
        ({}, {"reasoning_effort": "none"}, False),
        ({}, {"reasoning_effort": "low"}, True),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, False),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": True}},
            True,
        ),
    ],
)
async def test_answers_are_thought_about_unless_nobody_wants_it(
    settings: dict[str, Any], fields: dict[str, Any], thinks: bool
) -> None:
    template = "{% if not enable_thinking %}<think></think>{% endif %}"
    async with serving(chat_template=template, **settings) as served:
        _, body = await served.post("/apply-template", CHAT | fields)
    assert body == {"prompt": "" if thinks else "<think></think>"}


async def test_a_continued_message_may_have_begun_to_reason() -> None:
    begun = {"role": "assistant", "content": "<think>\nThe question is about the time, and so"}
    async with serving(chat_template=TEMPLATE.replace("assistant:", "")) as served:
        served.say(" on.\n</think>\n\nNoon.")
        body = CHAT | {"messages": [*CHAT["messages"], begun]}
        _, answer = await served.post("/v1/chat/completions", body)
        begun["content"] += "</think>Well"
        _, later = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" on.", "Noon.")
    assert later["choices"][0]["message"]["content"] == " on.\n</think>\n\nNoon."


async def test_a_call_that_is_cut_short_is_text() -> None:
    async with serving(chat_template=TEMPLATE) as served:
        served.say(ANSWER)
        body = CHAT | {"tools": TOOLS, "max_tokens": len(ANSWER) - 20}
        _, answer = await served.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].replace("Wait.", "", 1).strip() == CALL[:-20]


async def test_half_a_character_in_a_call_ends_no_answer() -> None:
    call = r'<tool_call>{"name": "now", "arguments": {"zone": "\ud83d"}}</tool_call>'
    async with serving(chat_template=TEMPLATE) as served:
        served.say(call)
        status, answer = await served.post("/v1/chat/completions", CHAT | {"tools": TOOLS})
        *events, done = await served.events("/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert (status, done) == (200, "[DONE]")
    (whole,) = answer["choices"][0]["message"]["tool_calls"]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["function"] == whole["function"]
    assert json.loads(whole["function"]["arguments"]) == {"zone": "\ud83d"}


HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{% if m['role'] == 'user' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{% if false %}<|channel|>{% endif %}"
)


async def test_a_continued_message_of_harmony_streams() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "It is"}]
    async with serving(chat_template=HARMONY_TEMPLATE) as served:
        served.say("noon.")
        events = await served.events("/v1/chat/completions", CHAT | {"messages": messages})
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    pieces = [delta["content"] for delta in deltas if delta.get("content")]
    assert pieces == [*"noon."]


async def test_reasoning_of_harmony_may_stay_in_the_content() -> None:
    reasoning = "<|channel|>analysis<|message|>hm<|end|>"
    async with serving(chat_template=HARMONY_TEMPLATE) as served:
        served.say(f"{reasoning}<|start|>assistant<|channel|>final<|message|>Noon.")
        body = CHAT | {"reasoning_format": "none"}
        _, answer = await served.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": f"{reasoning}Noon."}


async def test_a_template_without_a_place_for_tools_is_a_notice() -> None:
    async with serving(chat_template="{{ messages[0].content }}") as served:
        served.say("Noon.")
        for _ in range(2):
            status, _ = await served.post("/v1/chat/completions", CHAT | {"tools": TOOLS})
            assert status == 200
        _, props = await served.get("/props")
    (notice,) = [n for n in props["engine"]["notices"] if n["reason"] == "tools_unseen"]
    assert notice["count"] == 2
