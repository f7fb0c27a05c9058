"""Wrong types and hostile values: always a 4xx that names the field, never a 500."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import RequestError, SamplingParams
from server.errors import ApiError
from server.requests import ChatRequest, CompletionRequest, Limits
from server.sampling import FLAGS, INTEGERS, NUMBERS
from tests.server.serving import CHAT, Served

LIMITS = Limits(n_vocab=259, n_ctx=4096, n_parallel=4, defaults=SamplingParams())
NATIVE = {"prompt": "x", "n_predict": 1}
WRONG = {
    "number": ["1", True, [], {}, [1]],
    "integer": ["1", True, [], {}, 1.5],
    "flag": ["true", 1, 0, [], {}],
    "text": [1, True, [], {}],
    "list": ["x", 1, True, {}],
    "object": ["x", 1, True, []],
}
FIELDS = {
    **dict.fromkeys((*NUMBERS, "typical_p"), "number"),
    **dict.fromkeys(
        (*INTEGERS, "n_predict", "max_tokens", "seed", "n", "id_slot", "n_keep"), "integer"
    ),
    **dict.fromkeys((*FLAGS, "stream", "cache_prompt", "return_tokens", "return_progress"), "flag"),
    "timings_per_token": "flag",
    "model": "text",
    "grammar": "text",
    "json_schema": "object",
    "response_format": "object",
    "stream_options": "object",
    "dry_sequence_breakers": "list",
    "response_fields": "list",
    "lora": "list",
}
CHAT_FIELDS = {
    "tools": "list",
    "logprobs": "flag",
    "top_logprobs": "integer",
    "add_generation_prompt": "flag",
    "continue_final_message": "flag",
    "chat_template_kwargs": "object",
    "reasoning_effort": "text",
    "reasoning_format": "text",
    "parallel_tool_calls": "flag",
    "messages": "list",
}
HARD_LIMITS = [
    ("n_predict", -2), ("n_predict", 2**31), ("n", 0), ("n", 5), ("n", 10**6), ("id_slot", 4),
    ("id_slot", -2), ("n_keep", -2), ("repeat_last_n", -1), ("dry_multiplier", -1),
    ("dry_allowed_length", -1), ("min_keep", -1), ("adaptive_decay", 1), ("repeat_penalty", 0),
    ("repeat_penalty", -1), ("n_probs", 10**6), ("n_probs", -1), ("stop", ["x"] * 10_000),
    ("stop", ["x" * 1_000_000]), ("stop", [1]), ("stop", 5), ("stop", [["a"]]), ("logit_bias", 5),
    ("logit_bias", [5]), ("logit_bias", [[1]]), ("logit_bias", [[1, "x"]]),
    ("logit_bias", [[1, True]]),
    ("logit_bias", [[None, 1]]), ("logit_bias", [[1.5, 1]]), ("logit_bias", {"1": "x"}),
    ("samplers", 5), ("samplers", [5]), ("grammar_x_prompt", None), ("seed", 2**70),
    ("response_format", {"type": "x"}), ("response_format", {}),
    ("response_format", {"type": "json_schema"}), ("stream_options", {"include_usage": 1}),
]  # fmt: skip
SOFT_LIMITS = [
    ("temperature", -1), ("temperature", 1e300), ("top_p", 2), ("top_p", 0), ("top_p", -1),
    ("min_p", 7),
    ("top_k", -5), ("top_k", 10**9), ("top_k", 10**30), ("xtc_probability", 3), ("mirostat", 9),
    ("seed", -1), ("seed", 2**64), ("max_tokens", 1.0), ("logit_bias", {"99999": 1.0}),
    ("logit_bias", [[97, 1e9], ["ab", -1e9], [98, False]]), ("samplers", ["nonsense"]),
    ("stop", ["", ""]), ("n_probs", 256), ("unknown_field", {"a": [1]}), ("temperature", None),
    ("logit_bias", [[token, -100] for token in range(259)]),
]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_types_name_the_native_field(name: str) -> None:
    for value in WRONG[FIELDS[name]]:
        with pytest.raises((RequestError, ApiError), match=name.split("_prompt")[0]) as caught:
            CompletionRequest.parse_native({"prompt": "x", name: value}, LIMITS)
        assert isinstance(caught.value, RequestError) or caught.value.status == 400


@pytest.mark.parametrize("name", [*FIELDS, *CHAT_FIELDS])
def test_wrong_types_name_the_chat_field(name: str) -> None:
    for value in WRONG[(FIELDS | CHAT_FIELDS)[name]]:
        with pytest.raises(RequestError, match=name):
            ChatRequest.parse({"messages": CHAT["messages"], name: value}, LIMITS)


@pytest.mark.parametrize(("name", "value"), HARD_LIMITS)
async def test_hard_limits_are_400(served: Served, name: str, value: object) -> None:
    body = NATIVE | {name: value} if name != "grammar_x_prompt" else {"n_predict": 1}
    status, answer = await served.post("/completion", body)
    assert status == 400
    assert (name if name in body else "prompt") in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 400


@pytest.mark.parametrize(("name", "value"), SOFT_LIMITS)
async def test_soft_limits_are_moved(served: Served, name: str, value: object) -> None:
    status, answer = await served.post("/completion", NATIVE | {name: value})
    assert status == 200, answer


@pytest.mark.parametrize(
    "prompt",
    [1, True, {}, {"prompt_string": 1}, [1.5], [True], [-1], [259], [2**40], [None], [["a", None]],
    [[]],
     {"prompt_string": "x", "multimodal_data": ["y"]}, ["x"] * 300],
)  # fmt: skip
async def test_bad_prompts(served: Served, prompt: object) -> None:
    status, answer = await served.post("/completion", {"prompt": prompt, "n_predict": 1})
    assert status in (400, 501)
    assert "prompt" in answer["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None, {}, [], "x", [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [["x"]]}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}],
        [{"role": "assistant"}], [{"role": "assistant", "content": None, "tool_calls": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [{}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": 5}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 5}],
        [{"role": "x" * 100, "content": "x"}],
        [{"role": "user", "content": "x"}] * 10_001,
    ],
)  # fmt: skip
async def test_bad_messages(served: Served, messages: object) -> None:
    status, answer = await served.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert "messages" in answer["error"]["message"]


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"tools": [5]}, 400), ({"tools": [{}]}, 400), ({"tools": [{"type": "x"}]}, 400),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, 400),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, 400),
        ({"tools": [FUNCTION] * 10_000}, 400), ({"tool_choice": 5}, 400),
        ({"tool_choice": "x"}, 400),
        ({"tools": [FUNCTION], "tool_choice": {"function": {"name": "absent"}}}, 400),
        ({"tools": [FUNCTION], "tool_choice": {"function": {"name": "f"}}}, 501),
        ({"tools": [FUNCTION], "tool_choice": "required"}, 501),
        ({"tools": [FUNCTION], "tool_choice": "auto"}, 200), ({"tools": [FUNCTION]}, 200),
        ({"tools": [FUNCTION], "tool_choice": "none"}, 200),
        ({"response_format": {"type": "json_object"}}, 501),
        ({"response_format": {"type": "text"}}, 200),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, 501),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, 400),
        ({"grammar": "root ::= x"}, 501), ({"grammar": ""}, 200), ({"json_schema": {}}, 501),
        ({"lora": [{"id": 0}]}, 501), ({"lora": []}, 200), ({"top_logprobs": 2}, 400),
        ({"logprobs": True, "top_logprobs": 21}, 400), ({"reasoning_format": "x"}, 400),
        ({"reasoning_format": "none", "reasoning_effort": "high"}, 200),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, 400),
        ({"functions": [FUNCTION["function"]]}, 501), ({"functions": []}, 200),
        ({"continue_final_message": True}, 400), ({"chat_template_kwargs": {"a": 1}}, 200),
        *[({"chat_template_kwargs": {name: 1}}, 400) for name in
          ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")],
    ],
)  # fmt: skip
async def test_what_is_not_implemented_is_said(
    served: Served, fields: dict[str, object], status: int
) -> None:
    got, answer = await served.post("/v1/chat/completions", CHAT | fields)
    assert got == status, answer
    if status == 501:
        assert answer["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize(
    "field", [{"echo": True}, {"best_of": 2}, {"suffix": "x"}, {"best_of": "x"}]
)
async def test_openai_completions_refuse(served: Served, field: dict[str, object]) -> None:
    status, answer = await served.post("/v1/completions", {"prompt": "x", **field})
    assert status == 400
    assert next(iter(field)) in answer["error"]["message"]


DEEP = b"[" * 100_000
BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "not JSON": b"hello",
    "half": b'{"prompt": "x"',
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "deep list": DEEP,
    "deep in a field": b'{"prompt": "x", "y": ' + DEEP + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "1e400": b'{"prompt": "x", "temperature": 1e400}',
    "10^400": b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
    "10^400 tokens": b'{"prompt": "x", "n_predict": 1' + b"0" * 400 + b"}",
    "10^400 as a token": b'{"prompt": [1' + b"0" * 400 + b"]}",
    "10^400 as a bias": b'{"prompt": "x", "logit_bias": [[1, 1' + b"0" * 400 + b"]]}",
    "10^10000": b'{"prompt": "x", "seed": 1' + b"0" * 10_000 + b"}",
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "reversed surrogates": b'{"prompt": "\\udc00\\ud800 and more text"}',
    "bad UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "raw NUL": b'{"prompt": "\x00"}',
    "many values": b'{"prompt": [' + b"[]," * 500_001 + b"[]]}",
}


@pytest.mark.parametrize("name", BODIES)
async def test_hostile_bodies_are_400(served: Served, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with served.session.post(
        served.url + "/completion", data=io.BytesIO(BODIES[name]), headers=headers
    ) as response:
        answer = await response.json()
    assert response.status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 400


async def test_odd_bodies_that_are_fine(served: Served) -> None:
    for body in (
        b'{"prompt": "x", "prompt": "y", "n_predict": 1}',  # the last one counts
        b'{"prompt": "\\u0000", "n_predict": 1}',
        b'{"prompt": "\\ud83d\\ude00", "n_predict": 1}',
        b'{"prompt": "' + b"[{" * 1000 + b'", "n_predict": 1}',
    ):
        async with served.session.post(served.url + "/completion", data=body) as response:
            assert response.status == 200, await response.text()


async def test_compressed_bodies_are_refused(served: Served) -> None:
    import zlib

    bomb = zlib.compress(b" " * 50_000_000)
    headers = {"Content-Encoding": "deflate", "Content-Type": "application/json"}
    async with served.session.post(
        served.url + "/completion", data=bomb, headers=headers
    ) as response:
        assert response.status == 415


async def test_a_body_over_the_limit_is_413(served: Served) -> None:
    async with served.session.post(
        served.url + "/completion", data=io.BytesIO(b" " * (33 << 20))
    ) as response:
        answer = await response.json()
    assert response.status == 413
    assert answer["error"]["code"] == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*FIELDS, *CHAT_FIELDS, "prompt", "stop", "logit_bias", "samplers", "tool_choice"]
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_any_json_is_parsed_or_refused(fields: dict[str, object]) -> None:
    for parse in (
        CompletionRequest.parse_native,
        CompletionRequest.parse_openai,
        ChatRequest.parse,
    ):
        try:
            parse({"prompt": "x", **CHAT, **fields}, LIMITS)
        except (RequestError, ApiError) as error:
            assert not isinstance(error, ApiError) or error.status in (400, 501)
            assert len(json.dumps(str(error))) < 1000
