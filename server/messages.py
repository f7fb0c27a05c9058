"""The `messages` and `tools` of a chat, checked and brought into the form that templates expect."""

from __future__ import annotations

from runtime.errors import RequestError
from server.body import check_shape
from server.errors import Invalid, NotSupported
from server.fields import Fields, wrong_type

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 1024
MEDIA = ("image_url", "input_audio", "input_video", "image", "file")


def parse_messages(fields: Fields) -> list[dict[str, object]]:
    """`messages` as a chat template takes them: known fields only, of the right types."""
    items = fields.items("messages", limit=MAX_MESSAGES)
    if items is None:
        raise RequestError("messages", "is missing")
    if not items:
        raise RequestError("messages", "is empty")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(items)]


def parse_tools(fields: Fields) -> list[dict[str, object]] | None:
    """`tools` for the template, or None where the request has none or wants none used.

    Raises: NotSupported for a choice that would have to be enforced.
    """
    items = fields.items("tools", limit=MAX_TOOLS)
    if fields.items("functions", limit=MAX_TOOLS):
        raise NotSupported("Field 'functions': the form before 'tools'; use 'tools'")
    tools = [_tool(item, f"tools[{number}]") for number, item in enumerate(items or [])]
    fields.flag("parallel_tool_calls")
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        function = Fields(choice, "tool_choice").nested("function")
        name = None if function is None else function.text("name")
        if name not in [_name(tool) for tool in tools]:
            raise RequestError("tool_choice", "names a function that is not among the tools")
        raise NotSupported(
            "Field 'tool_choice': a certain tool cannot be enforced; use auto or none"
        )
    choice = fields.choice("tool_choice", ("auto", "none", "required"))
    if choice == "required":
        raise NotSupported("Field 'tool_choice': required cannot be enforced; use auto or none")
    return tools if tools and choice != "none" else None


def _message(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong_type(where, "must be an object", value)
    fields = Fields(value, where)
    role = fields.text("role")
    if not role or len(role) > 64:
        raise RequestError(f"{where}.role", "must be a short string")
    message: dict[str, object] = {"role": role}
    calls = fields.items("tool_calls", limit=MAX_TOOLS)
    if calls:
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    content = _content(fields, where)
    if content is None and not (role == "assistant" and calls):
        raise RequestError(f"{where}.content", "is missing")
    message["content"] = content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = fields.text(name)
        if text is not None:
            message[name] = text
    return message


def _content(fields: Fields, where: str) -> str | list[dict[str, str]] | None:
    value = fields.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", "must be a string or a list of parts", value)
    parts = fields.items("content", limit=MAX_PARTS) or []
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(parts)]


def _part(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(where, "must be an object", value)
    fields = Fields(value, where)
    kind = fields.choice("type", ("text", *MEDIA))
    if kind in MEDIA:
        raise RequestError(f"{where}.type", f"{kind} is not supported; this model reads text only")
    text = fields.text("text")
    if kind is None or text is None:
        raise RequestError(f"{where}.text", "a content part needs type and text")
    return {"type": "text", "text": text}


def _tool_call(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong_type(where, "must be an object", value)
    fields = Fields(value, where)
    function = fields.nested("function")
    name = None if function is None else function.text("name")
    if function is None or name is None:
        raise RequestError(f"{where}.function.name", "is missing")
    call: dict[str, object] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function, where)},
    }
    identifier = fields.text("id")
    return call if identifier is None else {"id": identifier, **call}


def _arguments(function: Fields, where: str) -> object:
    """JSON text or an object; templates get the form they want from the chat template's side."""
    value = function.raw("arguments")
    if value is None or isinstance(value, dict):
        return value or {}
    text = function.text("arguments") or ""
    try:
        check_shape(text.encode("utf-8", "replace"))
    except Invalid as error:
        raise RequestError(f"{where}.function.arguments", error.message) from error
    return text


def _tool(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise wrong_type(where, "must be an object", value)
    fields = Fields(value, where)
    kind = fields.text("type")
    if kind not in (None, "function"):
        raise RequestError(f"{where}.type", "only function tools are supported")
    function = fields.nested("function")
    if function is None or not function.text("name"):
        raise RequestError(f"{where}.function.name", "is missing")
    function.text("description")
    function.nested("parameters")
    return {"type": "function", "function": fields.mapping("function")}


def _name(tool: dict[str, object]) -> object:
    function = tool["function"]
    return function.get("name") if isinstance(function, dict) else None
