"""CompletionRequest and ChatRequest: JSON bodies, checked field by field.

Parsing is pure and needs only `Limits` of the engine; making token ids of the text is
`server.prompts`. Unknown fields are ignored, `null` is absent, and what would change the answer but
is not implemented (grammars, schemas, LoRA) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from runtime import SamplingParams
from runtime.errors import ContextTooLong, RequestError
from runtime.text.chat_template import check_variables
from server.errors import Invalid, NotSupported
from server.fields import Fields, wrong_type
from server.messages import parse_messages, parse_tools
from server.sampling import n_probs, sampling_params, with_probabilities

MAX_PROMPTS = 256
REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")
NO_GRAMMAR = "grammars and JSON schemas are not implemented; the answer would not follow them"

# A prompt as it was sent: a text, or a list of texts and token ids.
Prompt = str | list[str | int]


@dataclass(frozen=True)
class Limits:
    """What requests are checked against: token ids, lengths, `n`, `id_slot`.

    defaults   of the sampling fields
    """

    n_vocab: int
    n_ctx: int
    n_parallel: int
    defaults: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What all forms of generation share.

    n               answers for each prompt
    include_usage   a stream ends with a chunk that holds the usage
    special         the text shows control tokens
    reuse_prefix    KV of earlier prompts may be reused
    """

    params: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    reuse_prefix: bool = True
    timings_per_token: bool = False
    return_progress: bool = False
    return_tokens: bool = False
    special: bool = False
    response_fields: tuple[str, ...] = ()
    ping_interval: float | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """`/completion` and `/v1/completions`."""

    prompts: tuple[Prompt, ...]
    wishes: Wishes

    @classmethod
    def parse_native(cls, body: Mapping[str, object], limits: Limits) -> CompletionRequest:
        fields = Fields(body)
        wishes = _wishes(fields, limits, _probabilities(fields, limits, "n_probs", "logprobs"))
        return cls(_prompts(fields, limits), wishes)

    @classmethod
    def parse_openai(cls, body: Mapping[str, object], limits: Limits) -> CompletionRequest:
        fields = Fields(body)
        if fields.flag("echo"):
            raise Invalid("Field 'echo': repeating the prompt is not supported")
        if (fields.integer("best_of", low=1, high=2**31) or 1) > 1:
            raise Invalid("Field 'best_of': only 1 is supported")
        if fields.text("suffix"):
            raise Invalid("Field 'suffix': filling in is not supported")
        return cls.parse_native(body, limits)


@dataclass(frozen=True)
class ChatRequest:
    """`/v1/chat/completions`, and `/apply-template` which only renders it.

    continue_final_message   the answer continues the trailing assistant message
    reasoning_format         where reasoning goes; None: as the server is set
    """

    messages: list[dict[str, object]]
    wishes: Wishes
    tools: list[dict[str, object]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, object] = field(default_factory=dict)
    reasoning_format: str | None = None

    @classmethod
    def parse(
        cls, body: Mapping[str, object], limits: Limits, *, prefill: bool = True
    ) -> ChatRequest:
        fields = Fields(body)
        messages = parse_messages(fields)
        tools = parse_tools(fields)
        wishes = _wishes(fields, limits, _chat_probabilities(fields, limits))
        return cls(
            messages,
            wishes,
            tools,
            fields.flag("add_generation_prompt", True),
            _continues(fields, messages, prefill=prefill),
            _template_kwargs(fields),
            fields.choice("reasoning_format", REASONING_FORMATS),
        )


def _wishes(fields: Fields, limits: Limits, params: SamplingParams) -> Wishes:
    _refuse_unimplemented(fields)
    fields.text("model")
    fields.integer("id_slot", low=-1, high=limits.n_parallel - 1)
    fields.integer("n_keep", low=-1, high=2**31)
    options = fields.nested("stream_options") or Fields({})
    response_fields = fields.items("response_fields", limit=64) or []
    if not all(isinstance(name, str) for name in response_fields):
        raise RequestError("response_fields", "must be a list of strings")
    ping = fields.integer("sse_ping_interval", low=-1, high=86_400)
    return Wishes(
        params=params,
        n=fields.integer("n_cmpl", "n", low=1, high=limits.n_parallel) or 1,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        reuse_prefix=fields.flag("cache_prompt", True),
        timings_per_token=fields.flag("timings_per_token"),
        return_progress=fields.flag("return_progress"),
        return_tokens=fields.flag("return_tokens"),
        response_fields=tuple(str(name) for name in response_fields),
        ping_interval=float(ping) if ping else None,
    )


def _refuse_unimplemented(fields: Fields) -> None:
    """Whatever would change the answer and is not implemented ends in 501, never in silence."""
    if fields.text("grammar"):
        raise NotSupported(f"Field 'grammar': {NO_GRAMMAR}")
    if fields.nested("json_schema") is not None:
        raise NotSupported(f"Field 'json_schema': {NO_GRAMMAR}")
    if fields.items("lora", limit=1024):
        raise NotSupported("Field 'lora': LoRA adapters are not implemented")
    response_format = fields.nested("response_format")
    if response_format is not None:
        kind = response_format.choice("type", ("text", "json_object", "json_schema"))
        if kind is None:
            raise RequestError("response_format.type", "is missing")
        if kind == "json_schema":
            schema = response_format.nested("json_schema")
            if schema is None or schema.nested("schema") is None:
                raise RequestError("response_format.json_schema.schema", "must be an object")
        if kind != "text":
            raise NotSupported(f"Field 'response_format': {NO_GRAMMAR}")


def _probabilities(fields: Fields, limits: Limits, *names: str) -> SamplingParams:
    count = n_probs(fields, *names)
    return with_probabilities(sampling_params(fields, limits.defaults), count)


def _chat_probabilities(fields: Fields, limits: Limits) -> SamplingParams:
    """`logprobs: true` with `top_logprobs` 0..20 (20 where it is left out), or `n_probs`."""
    params = sampling_params(fields, limits.defaults)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", low=0, high=20)
    if top is not None and not wanted:
        raise RequestError("top_logprobs", "needs logprobs to be true")
    if not wanted:
        return with_probabilities(params, n_probs(fields, "n_probs"))
    return replace(params, logprobs=True, n_probs=20 if top is None else top)


def _prompts(fields: Fields, limits: Limits) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if value is None:
        raise RequestError("prompt", "is missing")
    if isinstance(value, list) and _is_batch(value):
        if len(value) > MAX_PROMPTS:
            raise RequestError("prompt", f"at most {MAX_PROMPTS} prompts are accepted")
        return tuple(_prompt(item, limits) for item in value)
    return (_prompt(value, limits),)


def _is_batch(items: list[object]) -> bool:
    """A list of prompts, unlike one prompt made of ids (and texts between them)."""
    return bool(items) and all(isinstance(item, str | list | dict) for item in items)


def _prompt(value: object, limits: Limits) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        nested = Fields(value, "prompt")
        if nested.items("multimodal_data", limit=1024):
            raise NotSupported("Field 'prompt.multimodal_data': images and sound are not supported")
        text = nested.text("prompt_string")
        if text is None:
            raise RequestError("prompt.prompt_string", "is missing")
        return text
    if not isinstance(value, list):
        raise wrong_type("prompt", "must be a string or a list", value)
    if not value:
        raise RequestError("prompt", "is empty")
    if len(value) > limits.n_ctx:
        raise ContextTooLong(len(value), limits.n_ctx)
    return [
        item if isinstance(item, str) else token_id("prompt", item, limits.n_vocab)
        for item in value
    ]


def token_id(name: str, value: object, n_vocab: int) -> int:
    """`value` as an id of the vocabulary."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_vocab:
        raise wrong_type(name, f"holds something that is no token id below {n_vocab}", value)
    return value


def _continues(fields: Fields, messages: list[dict[str, object]], *, prefill: bool) -> bool:
    last = messages[-1]
    if not fields.flag("continue_final_message", prefill and last["role"] == "assistant"):
        return False
    if last["role"] != "assistant":
        raise RequestError("continue_final_message", "needs a trailing assistant message")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise RequestError("messages", "only one trailing assistant message can be continued")
    if last.get("tool_calls"):
        raise RequestError("messages", "an assistant message with tool calls cannot be continued")
    return True


def _template_kwargs(fields: Fields) -> dict[str, object]:
    """`chat_template_kwargs` and the reasoning fields, as variables of the template."""
    kwargs = fields.mapping("chat_template_kwargs") or {}
    check_variables(kwargs)
    Fields(kwargs, "chat_template_kwargs").flag("enable_thinking")  # the text "false" is true
    effort = fields.text("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    fields.integer("thinking_budget_tokens", "reasoning_budget_tokens", low=-1, high=2**31)
    fields.flag("reasoning_control")
    return kwargs
