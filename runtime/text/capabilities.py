"""What a chat template can express, and conversations made fit for one that cannot.

Templates differ in what they take: some refuse a system message, some want tool arguments as an
object and some as JSON text, some want a message's content as a list of parts.  Each question is
answered by rendering a small conversation and looking for a marker in the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runtime.errors import EngineError
from runtime.text.metering import LimitExceeded

_MARK = "capability-7f3a"
_USER = {"role": "user", "content": "hello"}
_KEY = "probe_argument"
_TEXT_ARGUMENTS = json.dumps({_KEY: "x"})
_FORMS: tuple[Any, ...] = ({_KEY: "x"}, _TEXT_ARGUMENTS)
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
_FUNCTION = {
    "name": "probe_tool",  # not the mark: definitions must not pass for a message that appears
    "description": "probe",
    "parameters": _SCHEMA | {"required": ["a"]},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]


@dataclass(frozen=True)
class Capabilities:
    """system_role, developer_role: such messages appear; tools, tool_calls: definitions and calls
    do; object_arguments: a call's arguments may be an object; string_content, typed_content:
    content may be a text, a list of parts; thinking: reasoning stands in `thinking` beside calls,
    instead of `reasoning_content`; null_content: calls appear only where the content is null."""

    system_role: bool
    developer_role: bool
    string_content: bool
    typed_content: bool
    tools: bool
    tool_calls: bool
    object_arguments: bool
    thinking: bool
    null_content: bool

    def as_dict(self) -> dict[str, bool]:
        """By the names clients know: supports_*."""
        return {f"supports_{name}": value for name, value in asdict(self).items()}


def probe(source: str, render: Callable[..., str]) -> Capabilities:
    """What the template `source` can do.

    render: (messages=..., tools=..., add_generation_prompt=...) -> text, raises EngineError.

    Raises: LimitExceeded.
    """
    ask = _Probe(render)
    ask.null_content = not ask.writes_calls()
    ask.null_content = ask.null_content and ask.writes_calls()
    as_object = ask.called(f'"{_KEY}"', ask.call({_KEY: "x"})) or (
        ask.called(_KEY, ask.call({_KEY: "x"}))
        and not ask.called(f"'{_KEY}'", ask.call({_KEY: "x"}))
    )
    part = [{"type": "text", "text": _MARK}]
    return Capabilities(
        system_role=ask.called(_MARK, [{"role": "system", "content": _MARK}, _USER]),
        # Most templates write any role's name, but only those that know it were trained with it.
        developer_role="developer" in source
        and ask.called(_MARK, [{"role": "developer", "content": _MARK}, _USER]),
        string_content=ask.called(_MARK, [{"role": "user", "content": _MARK}]),
        typed_content=ask.called(_MARK, [{"role": "user", "content": part}])
        and not ask.called("'text'", [{"role": "user", "content": part}]),
        tools=ask.appears("probe_tool", [_USER], _TOOLS),
        tool_calls=as_object or ask.called("probe_call", ask.call(_TEXT_ARGUMENTS)),
        object_arguments=as_object,
        thinking=any(
            ask.called(_MARK, ask.call(arguments, thinking=_MARK))
            and not ask.called(_MARK, ask.call(arguments, reasoning_content=_MARK))
            for arguments in _FORMS
        ),
        null_content=ask.null_content,
    )


@dataclass
class _Probe:
    """Small conversations and what becomes of them; null_content: as in `Capabilities`."""

    render: Callable[..., str]
    null_content: bool = False

    def appears(self, what: str, messages: list[dict[str, Any]], tools: Any = None) -> bool:
        try:
            return what in self.render(messages=messages, tools=tools, add_generation_prompt=True)
        except LimitExceeded:
            raise  # it would happen again and again
        except EngineError:
            return False

    def called(self, what: str, messages: list[dict[str, Any]]) -> bool:
        """Templates for tools only may insist on definitions, others be confused by them."""
        return self.appears(what, messages) or self.appears(what, messages, _TOOLS)

    def call(self, arguments: Any, **more: str) -> list[dict[str, Any]]:
        """A conversation that ends with a call."""
        function = {"name": "probe_call", "arguments": arguments}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        content = None if self.null_content else ""
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        return [_USER, turn | more]

    def writes_calls(self) -> bool:
        return any(self.called("probe_call", self.call(arguments)) for arguments in _FORMS)


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of OpenAI tool definitions: name, description and parameters, in this order, which
    templates take for granted; then the rest."""
    defaults = {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}}
    copies = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            given = {name: value for name, value in function.items() if value is not None}
            copies.append({**tool, "function": defaults | given})
        else:
            copies.append(dict(tool))
    return copies


def adapted(
    messages: Sequence[Mapping[str, Any]], capabilities: Capabilities
) -> list[dict[str, Any]]:
    """Copies of `messages` in the form the template takes, saying the same."""
    turns = []
    for turn in map(dict, messages):
        if turn.get("role") == "developer" and not capabilities.developer_role:
            turn["role"] = "system"
        turn["content"] = _content(turn.get("content"), capabilities)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, capabilities) for call in turn["tool_calls"]]
            if capabilities.thinking and turn.get("reasoning_content"):
                # Beside `thinking` there is no place for a text.
                said = (turn["reasoning_content"], turn["content"])
                turn["thinking"] = "\n\n".join(text for text in said if text)
                turn["content"] = ""
            if capabilities.null_content:
                calls = turn.pop("tool_calls")
                turns += [turn] if turn["content"] else []
                turn = turn | {"content": None, "tool_calls": calls}
        turns.append(turn)
    if not capabilities.system_role and turns and turns[0].get("role") == "system":
        turns = _system_into_user(turns)
    return turns


def unreadable_arguments(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The first tool call's arguments that are no JSON object, as the field of a request."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and not _is_object(function.get("arguments")):
                return f"messages[{i}].tool_calls[{j}].function.arguments"
    return None


def _is_object(arguments: Any) -> bool:
    if not isinstance(arguments, str):
        return isinstance(arguments, Mapping)
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _content(content: Any, capabilities: Capabilities) -> Any:
    if content is None:
        return ""
    texts_only = isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )
    if texts_only and (capabilities.string_content or not capabilities.typed_content):
        return "\n".join(part["text"] for part in content)
    if isinstance(content, str) and capabilities.typed_content and not capabilities.string_content:
        return [{"type": "text", "text": content}]
    return content


def _call(call: Any, capabilities: Capabilities) -> Any:
    """One tool call with its arguments as an object or as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if capabilities.object_arguments and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not capabilities.object_arguments and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _system_into_user(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system text in front of the first user message."""
    system, *rest = turns
    for i, turn in enumerate(rest):
        if turn.get("role") == "user" and isinstance(turn["content"], str):
            merged = f"{system['content']}\n\n{turn['content']}"
            return [*rest[:i], turn | {"content": merged}, *rest[i + 1 :]]
    return [{"role": "user", "content": system["content"]}, *rest]
