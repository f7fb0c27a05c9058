"""Tools told in the system message, for templates that write calls but no definitions.

DeepSeek's own templates are of this kind: whoever uses tools is asked to describe them in words.
The example of a call is what the template itself writes for one, markers included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.errors import EngineError
from runtime.text.capabilities import Capabilities
from runtime.text.reply_formats import reply_format

_NAME, _ARGUMENTS = "tool_call_name", "tool_call_arguments"


def call_example(source: str, render: Callable[..., str], can: Capabilities) -> str | None:
    """How the template `source` writes a call, or None where that cannot be told.

    render   (messages=..., tools=..., add_generation_prompt=...) -> text, raises EngineError
    can      what it can express
    """
    calls = reply_format(source).calls
    if calls is None:
        return None
    arguments = {"name": "value"} if can.object_arguments else _ARGUMENTS
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None if can.null_content else ""}
    begin, end = calls.tags
    for n_calls in (1, 2):  # R1's writes the end of the block only where there are several
        turns = [{"role": "user", "content": ""}, turn | {"tool_calls": n_calls * [call]}]
        try:
            text = render(messages=turns, tools=None, add_generation_prompt=False)
        except EngineError:
            return None
        start, stop = text.rfind(begin), text.rfind(end)
        if 0 <= start < stop and _NAME in text[start:stop]:
            return text[start : stop + len(end)]
    return None


def tools_in_words(tools: Sequence[Mapping[str, Any]], example: str) -> str:
    """What a system message says of `tools`, which have all their parts."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    described = "\n\n".join(
        f"### {function['name']}\nDescription: {function['description']}\n\n"
        f"Parameters: {json.dumps(function['parameters'], ensure_ascii=False)}"
        for function in functions
    )
    return (
        f"## Tools\nYou have access to the following tools:\n\n{described}\n\n"
        f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{example}\n\n"
        f"Where:\n- `{_NAME}` must be an exact match to one of the available tools\n"
        "- the arguments must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
    )


def with_instructions(turns: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`turns` whose system message ends with `text`."""
    first = turns[0] if turns else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [first | {"content": f"{first['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
