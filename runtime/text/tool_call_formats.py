"""How model families write tool calls: from the text of a block to its calls.

Each reader gives the calls, an empty list where more text may complete the block (its end stands
inside of a value), and None for what can be no calls, so that it stays text.  `Schemas` says which
parameters of a function are strings: formats without quotes do not tell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.text.reply_markup import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> its parameters, name -> JSON schema."""

Reader = Callable[[str, Schemas], list[ToolCall] | None]

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
# A value ends where the next thing begins: what looks like an end may stand inside of it.
_PARAMETER_END = r"</parameter>(?=\s*(?:<parameter=|</function>))"
_PARAMETER = re.compile(rf"\s*<parameter=([^>\s]+)>\n?(.*?)\n?{_PARAMETER_END}", re.DOTALL)
_BARE_PARAMETER = re.compile(rf"\s*<parameter=([^>\s]+)>(.*?){_PARAMETER_END}", re.DOTALL)
PARAMETER_END = re.compile(_PARAMETER_END)
_PARAMETER_BEGIN = re.compile(r"\s*<parameter=[^>\s]+>")
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
ARGUMENT_END = re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")
_ARGUMENT_BEGIN = re.compile(r"\s*<arg_key>[^<]*</arg_key>\s*<arg_value>")
_IS_JSON = re.compile(r"\s*[{\[]")
STRING_END = re.compile(r'(?<!\\)(?:\\\\)*"')


def deepseek_marker(words: str) -> str:
    """DeepSeek's markers are written with a wide bar and a lower block between the words."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATOR, _END = map(deepseek_marker, ("tool call begin", "tool sep", "tool call end"))
_DEEPSEEK = re.compile(
    rf"\s*{_BEGIN}(?:function{_SEPARATOR})?(?P<name>[^\s<]+)(?:{_SEPARATOR}|\n)\s*(?:```json)?\s*"
)
_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*"
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
    """`{"name": .., "arguments": {..}}`, one, several or a list of them (Hermes, Qwen)."""
    calls = []
    rest = body.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
            found = [_json_call(item) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError) as error:
            return _unless_incomplete(error)
        if None in found:
            return None
        calls += [call for call in found if call]
        rest = rest[end:].lstrip()
    return calls or None


def read_function_tags(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`<function=name><parameter=key>value</parameter></function>` with values on lines of their
    own (Qwen coder)."""
    return _functions(_PARAMETER, body, schemas)


def read_bare_function_tags(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """The same with every line break part of the value (MiMo)."""
    return _functions(_BARE_PARAMETER, body, schemas)


def read_argument_tags(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>` (GLM)."""
    name, tag, _ = body.partition("<arg_key>")
    begin = len(name) if tag else len(body)
    name = name.strip()
    if not name or "<" in name or len(name.split()) > 1 or not (tag or name in schemas):
        return None
    pairs, at = _consecutive(_ARGUMENT, body, begin)
    if at < len(body):
        return _unless_open(_ARGUMENT_BEGIN, pairs, body, at)
    arguments = _arguments(pairs, schemas.get(name, {}))
    return None if arguments is None else [ToolCall(name, _dumped(arguments))]


def read_deepseek(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Name, separator and JSON between markers (DeepSeek); older models write `function` and a
    separator first, and the JSON in a code block."""
    return _marked_json(_DEEPSEEK, _END, body)


def read_kimi(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """`functions.name:0`, a marker and JSON between markers (Kimi)."""
    return _marked_json(_KIMI, "<|tool_call_end|>", body)


def read_object(name: str, text: str) -> list[ToolCall] | None:
    """The call of `name` with arguments that are all of the text (harmony)."""
    try:
        value = _DECODER.decode(text.strip() or "{}")
        if not isinstance(value, dict):
            return None
        return [ToolCall(name, _strict(text.strip() or "{}", value))]
    except (ValueError, RecursionError) as error:
        return _unless_incomplete(error)


def first_of(*readers: Reader) -> Reader:
    """What the first reader that understands the block makes of it."""

    def read(body: str, schemas: Schemas) -> list[ToolCall] | None:
        results = [calls for reader in readers if (calls := reader(body, schemas)) is not None]
        return max(results, key=bool, default=None)

    return read


def may_end(value_end: re.Pattern[str], body: str, start: int, stop: int) -> bool:
    """Whether a value of a block that is open at `start` can end before `stop`.

    value_end: what ends one where the block is no JSON
    """
    wanted = STRING_END if _IS_JSON.match(body) else value_end
    return wanted.search(body, start, stop) is not None


def _functions(parameter: re.Pattern[str], body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Calls between tags; parameter: how a name and a value are written."""
    calls = []
    at = 0
    while at < len(body):
        function = _FUNCTION.match(body, at)
        if function is None:
            return None
        pairs, at = _consecutive(parameter, body, function.end())
        end = _FUNCTION_END.match(body, at)
        if end is None:
            return _unless_open(_PARAMETER_BEGIN, pairs, body, at)
        arguments = _arguments(pairs, schemas.get(function[1], {}))
        if arguments is None:
            return None
        calls.append(ToolCall(function[1], _dumped(arguments)))
        at = end.end()
    return calls or None


def _marked_json(begin: re.Pattern[str], end: str, body: str) -> list[ToolCall] | None:
    """Calls made of `begin`, which names the function, JSON, and `end`."""
    closing = re.compile(rf"\s*(?:```)?\s*{re.escape(end)}\s*")
    calls = []
    at = 0
    while at < len(body):
        call = begin.match(body, at)
        if call is None:
            return None
        try:
            value, at = _DECODER.raw_decode(body, call.end())
            closed = closing.match(body, at)
            if closed is None or not isinstance(value, dict):
                return None
            calls.append(ToolCall(call["name"], _strict(body[call.end() : at], value)))
        except (ValueError, RecursionError) as error:
            return _unless_incomplete(error)
        at = closed.end()
    return calls or None


def _consecutive(pattern: re.Pattern[str], text: str, at: int) -> tuple[list[re.Match[str]], int]:
    """(matches that follow each other from `at`, where the last one ends)."""
    matches = []
    while match := pattern.match(text, at):
        matches.append(match)
        at = match.end()
    return matches, at


def _arguments(
    pairs: Sequence[re.Match[str]], parameters: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Names and values; None where a name comes twice, which would lose its first value."""
    arguments = {}
    for pair in pairs:
        name = pair[1].strip()
        arguments[name] = _value(pair[2], parameters.get(name))
    return arguments if len(arguments) == len(pairs) else None


def _unless_open(
    begin: re.Pattern[str], pairs: Sequence[re.Match[str]], body: str, at: int
) -> list[ToolCall] | None:
    """What a reader answers where the pairs end too early: only a value may go on."""
    twice = len({pair[1].strip() for pair in pairs}) < len(pairs)  # more text would not help
    return [] if begin.match(body, at) and not twice else None


_LITERALS = {"True": True, "False": False, "None": None}
"""As templates write these values that were put in by Python, and so models do."""


def _value(text: str, schema: Any) -> Any:
    """The text as its schema wants it: what may be a string stays one unless it is another of the
    types allowed; anything else is read as JSON."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    value = _parsed(text)
    is_json = value is not None or text.strip() == "null"
    if kinds is None or (is_json and not isinstance(value, str) and _kinds_of(value) & kinds):
        return value if is_json else text
    if "string" in kinds:
        return text
    literal = _LITERALS.get(text.strip(), text)
    if literal is not text and _kinds_of(literal) & kinds:
        return literal
    return value if is_json else text


def _kinds(schema: Any) -> set[str] | None:
    """The JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    if isinstance(values := schema.get("enum"), list):
        return set[str]().union(*map(_kinds_of, values))
    if "const" in schema:
        return _kinds_of(schema["const"])
    choices = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(choices, list) or not choices:
        return None
    found = [_kinds(choice) for choice in choices]
    return None if None in found else set[str]().union(*(kinds for kinds in found if kinds))


def _kinds_of(value: Any) -> set[str]:
    """The names that JSON schemas have for the type of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", dict: "object", list: "array"}
    return {names.get(type(value), "null")}


def _json_call(value: Any) -> ToolCall | None:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name or not _is_text(name):
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None and value.keys() - {"name", "id", "type"}:
        return None
    arguments = value.get(key)
    if isinstance(arguments, str):
        calls = read_object(name, arguments)
        return calls[0] if calls else None
    return ToolCall(name, _dumped(arguments or {})) if isinstance(arguments, dict | None) else None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of floats")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Lenient where the meaning is clear (line breaks in strings), strict where the caller's reader
# would fail on what we write (NaN, infinity).
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_no_constant)


def _parsed(text: str) -> Any:
    """The JSON value, or None where the text is none (a model's output nests as it likes)."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _unless_incomplete(error: Exception) -> list[ToolCall] | None:
    """What a reader answers to JSON that cannot be read: it may go on inside of a string only."""
    is_string = isinstance(error, json.JSONDecodeError) and "Unterminated string" in error.msg
    return [] if is_string else None


def _strict(text: str, value: dict[str, Any]) -> str:
    """`text`, which means `value`, unless a strict reader would refuse it."""
    try:
        json.loads(text)
    except ValueError:
        return _dumped(value)
    return text


def _dumped(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(arguments)


def _is_text(text: str) -> bool:
    """Whether UTF-8 can carry it: JSON's escapes can make half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
