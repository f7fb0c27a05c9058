"""How model families write tool calls: from the text of a block to its calls.

Each reader gives None for a block that is not well-formed, so that it stays text.  `Schemas` says
which parameters of a function are strings: formats without quotes do not tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.text.reply_markup import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> its parameters, name -> JSON schema."""

Reader = Callable[[str, Schemas], list[ToolCall] | None]

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)


def deepseek_marker(words: str) -> str:
    """DeepSeek's markers are written with a wide bar and a lower block between the words."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATOR, _END = map(deepseek_marker, ("tool call begin", "tool sep", "tool call end"))
_DEEPSEEK = re.compile(
    rf"\s*{_BEGIN}(?:function{_SEPARATOR})?"
    rf"(?P<name>[^\s<]+?)(?:{_SEPARATOR}|\n)(?P<arguments>.*?){_END}\s*",
    re.DOTALL,
)

_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<:]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """The parameters of OpenAI tool definitions."""
    found = {}
    for tool in tools or ():
        function = tool.get("function")
        if isinstance(function, dict):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            found[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
    return found


def read_json(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`{"name": .., "arguments": {..}}`, one or a list of them (Hermes, Qwen)."""
    value = _parsed(body)
    calls = [_json_call(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if calls and all(calls) else None


def read_function_tags(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`<function=name><parameter=key>value</parameter></function>` (Qwen coder, MiMo)."""
    calls = []
    for function in _consecutive(_FUNCTION, body) or ():
        arguments = _pairs(_PARAMETER, function[2], schemas.get(function[1], {}))
        if arguments is None:
            return None
        calls.append(ToolCall(function[1], _dumped(arguments)))
    return calls or None


def read_argument_tags(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>` (GLM)."""
    name, tag, _ = body.partition("<arg_key>")
    name = name.strip()
    if not name or "<" in name or len(name.split()) > 1:
        return None
    arguments = _pairs(_ARGUMENT, body[body.index(tag) :] if tag else "", schemas.get(name, {}))
    return None if arguments is None else [ToolCall(name, _dumped(arguments))]


def read_deepseek(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Name, separator and JSON between markers (DeepSeek); older models write `function` and a
    separator first, and the JSON in a code block."""
    return _marked_json(_DEEPSEEK, body)


def read_kimi(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`functions.name:0`, a marker and JSON between markers (Kimi)."""
    return _marked_json(_KIMI, body)


def _marked_json(pattern: re.Pattern[str], body: str) -> list[ToolCall] | None:
    """Calls by `name` and `arguments` of consecutive matches."""
    calls = []
    for call in _consecutive(pattern, body) or ():
        text = call["arguments"].strip().removeprefix("```json").removesuffix("```").strip()
        if not isinstance(_parsed(text), dict):
            return None
        calls.append(ToolCall(call["name"], text))
    return calls or None


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """The matches that make up the whole text; None if something stands between them."""
    matches = []
    at = 0
    while at < len(text.rstrip()):
        match = pattern.match(text, at)
        if match is None:
            return None
        matches.append(match)
        at = match.end()
    return matches


def first_of(*readers: Reader) -> Reader:
    """What the first reader that understands the block makes of it."""

    def read(body: str, schemas: Schemas) -> list[ToolCall] | None:
        return next((calls for reader in readers if (calls := reader(body, schemas))), None)

    return read


def _pairs(
    pattern: re.Pattern[str], text: str, parameters: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Names and values of consecutive tags that make up the whole text."""
    pairs = _consecutive(pattern, text)
    if pairs is None:
        return None
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name = pair[1].strip()
        if name in arguments:
            return None  # a name that comes twice would lose its first value
        arguments[name] = _value(pair[2], parameters.get(name))
    return arguments


def _value(text: str, schema: Any) -> Any:
    """The text as its schema wants it: a string stays one, anything else is read as JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    value = _parsed(text)
    return text if value is None and text.strip() != "null" else value


def _json_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        return ToolCall(value["name"], _dumped(arguments))
    if isinstance(arguments, str) and isinstance(_parsed(arguments), dict):
        return ToolCall(value["name"], arguments)
    return None


def _parsed(text: str) -> Any:
    """The JSON value, or None where the text is none (a model's output nests as it likes)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
