"""`/completion`, llama-server's own form."""

from __future__ import annotations

import pytest

from tests.server.serving import CHAT, Served

FINAL_FIELDS = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted",
    "tokens_evaluated", "generation_settings", "prompt",
    "has_new_line", "truncated", "stop_type", "stopping_word",
    "tokens_cached", "timings",
}  # fmt: skip
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n",
    "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


async def test_answer_has_llama_server_s_fields(served: Served) -> None:
    status, answer = await served.post("/completion", {"prompt": "hi", "n_predict": 5, "seed": 1})
    assert status == 200
    assert set(answer) == FINAL_FIELDS
    assert set(answer["timings"]) == TIMINGS
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 5
    assert answer["tokens_evaluated"] == 2
    assert answer["generation_settings"]["n_predict"] == 5
    assert answer["generation_settings"]["seed"] == 1
    assert answer["prompt"] == "hi"


async def test_stream_ends_with_the_full_answer_and_no_done(served: Served) -> None:
    body = {"prompt": "hi", "n_predict": 6, "seed": 1}
    _, plain = await served.post("/completion", body)
    events = await served.events("/completion", body)
    assert "[DONE]" not in events
    assert all(event["stop"] is False for event in events[:-1])
    assert set(events[-1]) == FINAL_FIELDS
    assert events[-1]["content"] == ""
    assert "".join(event["content"] for event in events) == plain["content"]


async def test_ids_in_and_out(served: Served) -> None:
    _, by_text = await served.post(
        "/completion", {"prompt": "ab", "n_predict": 4, "temperature": 0, "return_tokens": True}
    )
    _, by_ids = await served.post(
        "/completion", {"prompt": [97, 98], "n_predict": 4, "temperature": 0, "return_tokens": True}
    )
    _, mixed = await served.post(
        "/completion",
        {"prompt": ["a", 98], "n_predict": 4, "temperature": 0, "return_tokens": True},
    )
    assert by_text["tokens"] == by_ids["tokens"] == mixed["tokens"]
    assert len(by_ids["tokens"]) == 4
    assert by_ids["prompt"] == mixed["prompt"] == "ab"


async def test_several_prompts_give_a_list(served: Served) -> None:
    _, answers = await served.post(
        "/completion", {"prompt": ["a", [98, 99]], "n_predict": 2, "n": 2}
    )
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == ["a", "a", "bc", "bc"]


async def test_n_probs(served: Served) -> None:
    body = {"prompt": "hi", "n_predict": 3, "n_probs": 2, "temperature": 0}
    _, answer = await served.post("/completion", body)
    entries = answer["completion_probabilities"]
    assert len(entries) == 3
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert entries[0]["logprob"] == entries[0]["top_logprobs"][0]["logprob"]
    events = await served.events("/completion", body)
    streamed = [event["completion_probabilities"][0] for event in events[:-1]]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in entries]
    _, after = await served.post("/completion", {**body, "post_sampling_probs": True})
    assert after["completion_probabilities"][0]["prob"] == 1.0
    assert "top_probs" in after["completion_probabilities"][0]


async def test_response_fields_are_picked_and_un_nested(served: Served) -> None:
    _, answer = await served.post(
        "/completion",
        {
            "prompt": "a",
            "n_predict": 1,
            "response_fields": ["content", "timings/prompt_n", "no/such"],
        },
    )
    assert set(answer) == {"content", "timings/prompt_n"}


async def test_nothing_to_generate_fills_the_cache(served: Served) -> None:
    prompt = "a prompt that is longer than one page of the cache"
    _, answer = await served.post("/completion", {"prompt": prompt, "n_predict": 0})
    assert answer["content"] == ""
    assert answer["tokens_predicted"] == 0
    _, again = await served.post("/completion", {"prompt": prompt, "n_predict": 1})
    assert again["timings"]["cache_n"] > 0
    _, fresh = await served.post(
        "/completion", {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
    )
    assert fresh["timings"]["cache_n"] == 0


async def test_stop_string_is_named_and_not_in_the_output(served: Served) -> None:
    served.say("one STOP two")
    body = {"prompt": "x", "temperature": 0, "stop": ["STOP"]}
    _, answer = await served.post("/completion", body)
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (
        "one ",
        "word",
        "STOP",
    )
    events = await served.events("/completion", body)
    assert "".join(event["content"] for event in events) == "one "


@pytest.mark.parametrize("n_predict", range(1, 12))
async def test_held_back_text_is_not_lost(served: Served, n_predict: int) -> None:
    """A limit in the middle of what may become a stop string: the stream has all of the text."""
    served.say("ab STOX STOP")
    body = {"prompt": "x", "temperature": 0, "stop": ["STOP"], "n_predict": n_predict}
    _, plain = await served.post("/completion", body)
    events = await served.events("/completion", body)
    assert plain["content"] == "ab STOX STOP"[:n_predict]
    assert "".join(event["content"] for event in events) == plain["content"]


async def test_progress_and_timings_per_token(served: Served) -> None:
    events = await served.events(
        "/completion",
        {
            "prompt": "ab" * 40,
            "n_predict": 3,
            "seed": 1,
            "return_progress": True,
            "timings_per_token": True,
        },
    )
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] == 80
    # Readers of a stream take these from every event.
    assert all({"index", "content", "stop"} <= set(event) for event in events)
    pieces = [event for event in events if event.get("content")]
    assert pieces[-1]["timings"]["predicted_n"] >= 2


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a", "max_tokens": 2})],
)
async def test_progress_of_the_openai_forms_has_a_choice(
    served: Served, path: str, body: dict[str, object]
) -> None:
    events = await served.events(path, body | {"return_progress": True})
    assert "prompt_progress" in events[0]
    assert all(event["choices"] for event in events if event != "[DONE]")


async def test_full_context_ends_the_answer(served: Served) -> None:
    status, answer = await served.post(
        "/completion", {"prompt": [97] * 4090, "n_predict": 100, "ignore_eos": True}
    )
    assert status == 200
    assert answer["truncated"] is True
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == 6


async def test_too_long_a_prompt_says_how_long(served: Served) -> None:
    status, answer = await served.post("/completion", {"prompt": [97] * 4096})
    assert status == 400
    assert answer["error"]["type"] == "exceed_context_size_error"
    assert answer["error"]["n_prompt_tokens"] == 4096
    assert answer["error"]["n_ctx"] == 4096


async def test_empty_prompt_is_refused(served: Served) -> None:
    for prompt in ("", [], None, [""]):
        status, answer = await served.post("/completion", {"prompt": prompt})
        assert status == 400
        assert "prompt" in answer["error"]["message"]
