"""Conversations a chat template cannot take are put so that it can."""

from __future__ import annotations

import json

import pytest

from runtime.errors import RequestError, TemplateError
from tests.text.test_chat_template import ECHO, TOOL, USER, render

REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + ECHO
)


def test_system_goes_into_the_first_user_message() -> None:
    system = {"role": "system", "content": "S"}
    assert render(REFUSES_SYSTEM, system, USER) == "[user:S\n\nHi]"
    assert render(ECHO, system, USER) == "[system:S][user:Hi]"


def test_developer_becomes_system_unless_known() -> None:
    developer = {"role": "developer", "content": "D"}
    assert render(ECHO, developer) == "[system:D]"
    assert render(ECHO + "{# developer #}", developer) == "[developer:D]"


def test_definitions_that_appear_say_nothing_about_messages() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'user' %}"
    text = render(
        source + "{{ m.content }}{% endif %}{% endfor %}{# developer #}",
        {**USER, "role": "developer"},
        USER,
    )
    assert "Hi\n\nHi" in text


def test_parts_and_null_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(ECHO, {"role": "user", "content": parts}) == "[user:a\nb]"
    assert render(ECHO, {"role": "assistant", "content": None}) == "[assistant:]"


def test_text_becomes_parts_where_only_they_work() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert render(source) == "Hi;"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ c.function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '' + c.function.arguments }}", '{"a":1}'),
    ],
)
def test_tool_arguments_as_the_template_wants_them(source: str, expected: str) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        + source
        + "{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"a":1}'}
    call = {"id": "1", "type": "function", "function": function}
    assert render(source, {"role": "assistant", "tool_calls": [call]}) == expected


def test_tools_get_the_optional_parts_that_templates_take_for_granted() -> None:
    source = (
        "{% for t in tools %}{{ '// ' + t.function.description }}"
        "{{ t.function.parameters.properties.items() | list | length }}"
        "{{ t.function | tojson }}{% endfor %}"
    )
    bare = {"type": "function", "function": {"description": None, "strict": True, "name": "f"}}
    text = render(source, tools=[bare])
    parameters = {"type": "object", "properties": {}}
    whole = {"name": "f", "description": "", "parameters": parameters, "strict": True}
    assert text == "// 0" + json.dumps(whole)
    assert render("{{ tools | tojson }}", tools=[TOOL]) == json.dumps([TOOL])
    assert bare["function"]["description"] is None  # type: ignore[index]


def test_reasoning_beside_calls_goes_where_the_template_reads_it() -> None:
    body = "{% for m in messages %}{{ m.FIELD }}|{{ m.content }};{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {
        "role": "assistant",
        "content": "C",
        "reasoning_content": "R",
        "tool_calls": [call],
    }
    assert render(body.replace("FIELD", "thinking"), turn) == "R\n\nC|;"
    assert render(body.replace("FIELD", "reasoning_content"), turn) == "R|C;"
    assert render(body.replace("FIELD", "thinking"), turn | {"tool_calls": None}) == "|C;"


def test_arguments_that_are_no_object_are_named_where_the_template_needs_one() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments.items() %}{{ name }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": text}}
        for text in ('{"a": 1}', '{"a": ')
    ]
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[1\]\.function"):
        render(source, USER, {"role": "assistant", "tool_calls": calls})
    with pytest.raises(TemplateError):
        render("{{ 1 + 'a' }}", USER, {"role": "assistant", "tool_calls": calls[:1]})
    calls[1]["function"]["arguments"] = 200_000 * '{"a":' + "1" + 200_000 * "}"
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[1\]\.function"):
        render(source, USER, {"role": "assistant", "tool_calls": calls})


def test_calls_that_appear_only_beside_null_stand_alone() -> None:
    source = (
        "{% for m in messages %}[{% if m.content is none %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}]{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert render(source, USER, turn) == '[Hi][f{"a": 1}]'
    assert render(source, USER, turn | {"content": "So"}) == '[Hi][So][f{"a": 1}]'
    assert render(source, USER, {"role": "assistant", "content": None}) == "[Hi][]"
