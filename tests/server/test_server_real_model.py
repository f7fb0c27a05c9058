"""The bundled model on the CPU behind a real socket, asked by the real OpenAI client."""

from __future__ import annotations

import openai

import runtime
from tests.server.serving import serving

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


async def test_the_bundled_model_answers_over_http() -> None:
    async with (
        serving(runtime.EngineConfig()) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": QUESTION}]
        plain = await client.chat.completions.create(model="any", messages=messages, temperature=0)
        assert plain.choices[0].message.content == ANSWER
        assert plain.choices[0].finish_reason == "stop"

        stream = await client.chat.completions.create(
            model="any", messages=messages, temperature=0, stream=True
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == ANSWER
        assert len([text for text in texts if text]) > 1

        # The same prompt as ids, in llama-server's own form.
        _, applied = await served.post("/apply-template", {"messages": messages})
        tokens = {"content": applied["prompt"], "add_special": True, "parse_special": True}
        _, prompt = await served.post("/tokenize", tokens)
        status, native = await served.post(
            "/completion", {"prompt": prompt["tokens"], "temperature": 0, "return_tokens": True}
        )
        assert status == 200
        assert native["content"] == ANSWER
        assert native["tokens_evaluated"] == len(prompt["tokens"])
        _, text = await served.post("/detokenize", {"tokens": native["tokens"]})
        assert text["content"].startswith(ANSWER)
