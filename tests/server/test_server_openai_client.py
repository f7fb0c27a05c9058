"""The real OpenAI client against the real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.server.serving import Served, serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_chat_answers(served: Served, client: openai.AsyncOpenAI) -> None:
    served.say("Hello, world.")
    answer = await client.chat.completions.create(model="any", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "fake"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello, world.") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_streams_what_it_answers(served: Served, client: openai.AsyncOpenAI) -> None:
    served.say("Grüße, 漢字!")
    stream = await client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Grüße, 漢字!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Grüße, 漢字!".encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1


async def test_max_tokens_ends_with_length(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=3, seed=1
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_n_answers_and_seed(client: openai.AsyncOpenAI) -> None:
    async def ask() -> list[str | None]:
        answer = await client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=12, n=3, seed=7, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = await ask()
    assert first == await ask()
    assert len(set(first)) == 3


async def test_streamed_n_answers_carry_their_index(client: openai.AsyncOpenAI) -> None:
    options = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 3}
    plain = await client.chat.completions.create(**options)
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]


async def test_stop_strings_end_the_answer(served: Served, client: openai.AsyncOpenAI) -> None:
    served.say("one two three")
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, stop=[" thr", "zzz"]
    )
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "stop"


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


async def test_text_completion(served: Served, client: openai.AsyncOpenAI) -> None:
    served.say("abc")
    answer = await client.completions.create(model="any", prompt=["x", "y"], temperature=0)
    assert [choice.text for choice in answer.choices] == ["abc", "abc"]
    assert answer.object == "text_completion"
    stream = await client.completions.create(model="any", prompt="x", temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["fake"]


async def test_errors_are_the_client_s_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(
            model="any", messages=MESSAGES, temperature="hot"  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="messages"):
        await client.chat.completions.create(model="any", messages=[], stream=True)
    async with serving(api_keys=("secret",)) as locked:
        stranger = openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
        friend = openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="secret", max_retries=0)
        async with stranger, friend:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            assert (await friend.models.list()).data


async def test_sixty_four_at_once(client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str | None:
        answer = await client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": f"number {number % 8}"}],
            max_tokens=5,
            temperature=0,
        )
        return answer.choices[0].message.content

    texts = await asyncio.gather(*(ask(number) for number in range(64)))
    assert len(set(texts)) == 8, (
        "the same question must get the same answer, whoever runs beside it"
    )
