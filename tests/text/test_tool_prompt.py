"""Tools for templates that write calls but no definitions."""

from __future__ import annotations

from runtime.text.chat_template import ChatTemplate, without_guard
from runtime.text.guard import GUARD
from runtime.text.reply_formats import DEEPSEEK_CALLS
from runtime.text.tool_call_formats import deepseek_marker
from tests.text.test_chat_template import ECHO, TOOL, USER

BEGIN, SEPARATOR, END = (
    deepseek_marker(words) for words in ("tool call begin", "tool sep", "tool call end")
)
CALLS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% if m.tool_calls %}"
    + DEEPSEEK_CALLS[0]
    + "{% for c in m.tool_calls %}"
    + f"{BEGIN}{{{{ c.function.name }}}}{SEPARATOR}{{{{ c.function.arguments | tojson }}}}{END}"
    + "{% endfor %}"
    + DEEPSEEK_CALLS[1]
    + "{% endif %}]{% endfor %}"
)
EXAMPLE = (
    f"{DEEPSEEK_CALLS[0]}{BEGIN}tool_call_name{SEPARATOR}"
    f'{{"name": "value"}}{END}{DEEPSEEK_CALLS[1]}'
)


def test_the_system_message_describes_them_with_a_call_as_the_template_writes_it() -> None:
    template = ChatTemplate(CALLS, controls=[*DEEPSEEK_CALLS])
    text = template.render([{"role": "system", "content": "Be kind."}, USER], tools=[TOOL])
    assert text.startswith("[system:Be kind.\n\n## Tools\n")
    assert text.endswith("][user:Hi]")
    assert "### weather\nDescription: Rain?\n\nParameters: {" in text
    assert f"\n{EXAMPLE}\n" in text
    assert template.render([USER], tools=[TOOL]).startswith("[system:## Tools\n")
    assert template.render([USER]) == "[user:Hi]"


def test_definitions_are_guarded_and_the_example_is_not() -> None:
    template = ChatTemplate(CALLS, controls=[*DEEPSEEK_CALLS])
    tool = {"type": "function", "function": {"name": "f", "description": DEEPSEEK_CALLS[1]}}
    text = template.render([USER], tools=[tool])
    assert text.count(DEEPSEEK_CALLS[1]) == 1
    assert text.count(GUARD) == 1
    assert without_guard(text).count(DEEPSEEK_CALLS[1]) == 2


def test_the_example_has_several_calls_where_only_they_end_the_block() -> None:
    r1 = CALLS.replace(
        DEEPSEEK_CALLS[1], "{% if m.tool_calls | length > 1 %}" + DEEPSEEK_CALLS[1] + "{% endif %}"
    )
    text = ChatTemplate(r1).render([USER], tools=[TOOL])
    assert text.count("`tool_call_name`") == 1
    assert text.count(f"{BEGIN}tool_call_name{SEPARATOR}") == 2


def test_templates_that_write_definitions_or_no_calls_stay_as_they_are() -> None:
    own = ChatTemplate("{{ tools | tojson }}" + CALLS)
    assert own.render([USER], tools=[TOOL]).endswith("}}}][user:Hi]")
    assert own.shows_tools
    assert ChatTemplate(CALLS).shows_tools
    plain = ChatTemplate(ECHO)
    assert plain.render([USER], tools=[TOOL]) == "[user:Hi]"
    assert not plain.shows_tools
    assert ChatTemplate(ECHO, tool_use="{{ tools | tojson }}").shows_tools
