"""A conversation to the text a model was trained on, by the jinja template in its file.

The result contains `guard.GUARD` characters inside the messages' words; tokenize it with
`Tokenizer.encode(text, parse_special=True, guard=GUARD)`, show it with `without_guard(text)`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runtime.checks import shown
from runtime.errors import RequestError, TemplateError
from runtime.text.builtin_templates import BUILTIN_TEMPLATES
from runtime.text.capabilities import Capabilities, adapted, described, probe, unreadable_arguments
from runtime.text.guard import GUARD, Guard, without_guard
from runtime.text.metering import VISIT, LimitExceeded, Limits, meter, metered
from runtime.text.sandbox import Sandbox, explain, run
from runtime.text.tool_prompt import call_example, tools_in_words, with_instructions

if TYPE_CHECKING:
    from jinja2 import Template

    from runtime.text.tokenizer import Tokenizer

__all__ = ["BUILTIN_TEMPLATES", "GUARD", "ChatTemplate", "check_variables", "without_guard"]

MAX_SOURCE = 1 << 17  # ten times the largest in use; what fits compiles in a few seconds
_END_OF_FINAL_MESSAGE = "\ufdd1"  # a noncharacter, as GUARD
_RESERVED = (
    "bos_token", "eos_token", "raise_exception", "strftime_now", "namespace", "range",
    "self", "messages", "tools", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def check_variables(names: Iterable[str]) -> None:
    """Raises: RequestError for a template variable whose value comes from elsewhere."""
    for name in names:
        if name in _RESERVED:
            raise RequestError("chat_template_kwargs", f"'{name}' cannot be set")


class ChatTemplate:
    """One compiled template; immutable, usable from any thread."""

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        controls: Iterable[str] = (),
        tool_use: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """source: jinja text; controls: texts of the model's control tokens; tool_use: a second
        template, used when tools are passed.

        Raises: TemplateError for a template that is too large, invalid, or fails its limits.
        """
        self.source = source
        self._variables = {"bos_token": bos, "eos_token": eos}
        self._guard = Guard(controls)
        self._limits = limits or Limits()
        self._template = _compile(source, self._limits)
        self._tool_use = (
            ChatTemplate(tool_use, bos, eos, controls, None, limits) if tool_use else None
        )

    @classmethod
    def for_model(
        cls, metadata: Mapping[str, object], tokenizer: Tokenizer, override: str | None = None
    ) -> ChatTemplate:
        """The template of a model file; ChatML for a model without one that has <|im_start|>.

        override: the name of a built-in template, or jinja text, instead of the file's.

        Raises: TemplateError when there is none, or it is invalid.
        """
        found = metadata.get("tokenizer.chat_template")
        tool_use = metadata.get("tokenizer.chat_template.tool_use")
        if override is not None:
            source, tool_use = _named(override), None
        elif isinstance(found, str) and found:
            source = found
        elif "<|im_start|>" in tokenizer.vocabulary.ids:
            source, tool_use = BUILTIN_TEMPLATES["chatml"], None
        else:
            raise TemplateError(
                "the model has no chat template; choose one by --chat-template NAME "
                f"({', '.join(BUILTIN_TEMPLATES)}) or --chat-template-file, or use /v1/completions"
            )
        bos, eos = (
            "" if id is None else tokenizer.vocabulary.texts[id]
            for id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        controls = tokenizer.vocabulary.controls
        return cls(source, bos, eos, controls, tool_use if isinstance(tool_use, str) else None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as guarded text.

        tools                   OpenAI tool definitions, passed to the template
        add_generation_prompt   end with the beginning of an assistant's turn
        continue_final_message  end inside the last message instead, so that the model goes on
        kwargs                  more variables (chat_template_kwargs)

        Raises: TemplateError when the template fails, RequestError when it refuses the
        conversation (raise_exception), one of these is of the wrong kind, or a variable is not
        allowed.
        """
        _check_conversation(messages, tools)
        if tools and self._tool_use is not None:
            return self._tool_use.render(
                messages, tools, add_generation_prompt, continue_final_message, **kwargs
            )
        check_variables(kwargs)
        turns = [self._guard.message(message) for message in adapted(messages, self.capabilities)]
        definitions = self._guard.value(described(tools)) if tools else None
        if definitions and self._call_example is not None:
            turns = with_instructions(turns, tools_in_words(definitions, self._call_example))
        if continue_final_message:
            turns = _with_mark(turns)
            add_generation_prompt = False
        try:
            text = self._render(
                messages=turns,
                tools=definitions,
                add_generation_prompt=add_generation_prompt,
                **self._guard.value(kwargs),
            )
        except TemplateError as error:
            field = unreadable_arguments(messages)
            if field is None or isinstance(error, LimitExceeded):
                raise
            raise RequestError(field, "this chat template needs the JSON of an object") from error
        return _up_to_mark(text) if continue_final_message else text

    def source_with(self, tools: object) -> str:
        """The jinja text that `render` uses with these tools."""
        return self._tool_use.source if tools and self._tool_use is not None else self.source

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the template can express, found by rendering small conversations."""
        return probe(self.source, self._render)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a model learns of the tools passed to `render`."""
        if self._tool_use is not None:  # which `render` uses with tools
            return self._tool_use.shows_tools
        return self.capabilities.tools or self._call_example is not None

    @cached_property
    def _call_example(self) -> str | None:
        """A call as this template writes it, where it writes no definitions."""
        can = self.capabilities
        if can.tools or not can.tool_calls or not can.system_role:
            return None
        return call_example(self.source, self._render, can)

    def _render(self, **variables: Any) -> str:
        try:
            return metered(self._limits, lambda: run(self._template, self._variables | variables))
        except Exception as error:  # a template can make any Python exception happen
            raise explain(error, self._template) from error


def _check_conversation(messages: object, tools: object) -> None:
    """Raises: RequestError where messages are none, or tools no list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError("messages", f"{shown(messages)} is not a list of messages")
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(field, f"{shown(message)}: use {{'role': ..., 'content': ...}}")
        content = message.get("content")
        if not (content is None or isinstance(content, str) or _are_objects(content)):
            wanted = "use a text or a list of parts ({'type': ...})"
            raise RequestError(f"{field}.content", f"{shown(content)}: {wanted}")
    if not (tools is None or _are_objects(tools)):
        raise RequestError("tools", f"{shown(tools)} is not a list of tools ({{'type': ...}})")


def _are_objects(items: object) -> bool:
    return isinstance(items, list | tuple) and all(isinstance(item, Mapping) for item in items)


def _compile(source: str, limits: Limits) -> Template:
    """The template object of `source`.  Raises: TemplateError."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed"
        )
    environment = Sandbox()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        return metered(limits, lambda: environment.from_string(source))
    except Exception as error:  # constant folding runs filters, and they can raise anything
        raise explain(error) from error


def _named(override: str) -> str:
    """The built-in template of that name, or jinja text as it is."""
    if override in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[override]
    if "{{" in override or "{%" in override:
        return override
    raise TemplateError(
        f"there is no built-in chat template {override!r}; known: {', '.join(BUILTIN_TEMPLATES)}"
    )


def _with_mark(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`turns` with a mark where the last message's words end."""
    content = turns[-1].get("content") if turns else None
    if isinstance(content, str):
        return [*turns[:-1], turns[-1] | {"content": content + _END_OF_FINAL_MESSAGE}]
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        last = content[-1] | {"text": content[-1]["text"] + _END_OF_FINAL_MESSAGE}
        return [*turns[:-1], turns[-1] | {"content": [*content[:-1], last]}]
    raise RequestError("messages", "the last message has no text that could be continued")


def _up_to_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_OF_FINAL_MESSAGE)
    if not mark:
        raise TemplateError("the chat template leaves out the last message; it cannot be continued")
    return before.replace(_END_OF_FINAL_MESSAGE, "")


def _refuse(message: str) -> None:
    """`raise_exception` of a template: the conversation is not one this model can have."""
    raise RequestError("messages", f"refused by the chat template: {without_guard(str(message))}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: not escaped for HTML or ASCII."""
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii),
        indent=None if indent is None else min(int(indent), 16),
        separators=separators,
        sort_keys=bool(sort_keys),
    )
    count = meter().charge
    chunks = []
    for chunk in encoder.iterencode(value):
        count(len(chunk) + VISIT)
        chunks.append(chunk)
    return "".join(chunks)


_DATE_FIELD = re.compile(r"%[-_0^#]?[A-Za-z%]")


def _strftime_now(format: str) -> str:
    """The local time now; formats with a width are refused (they can ask for gigabytes)."""
    if len(format) > 200 or "%" in _DATE_FIELD.sub("", format):
        raise TemplateError("the chat template uses a date format that is not allowed")
    return datetime.datetime.now().astimezone().strftime(format)
