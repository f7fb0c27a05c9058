"""A chat turn through the model's own template.  Usage: python examples/chat.py [MODEL.gguf]"""

from __future__ import annotations

import asyncio
import sys

import runtime


async def main(model: str | None) -> None:
    """Ask one question and print the answer as it comes."""
    async with runtime.open_engine(runtime.EngineConfig(model=model)) as engine:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        ids = await engine.chat_prompt(messages)
        params = runtime.SamplingParams(temperature=0.0, max_tokens=64)
        async for token in engine.generate(ids, params):
            print(token.text, end="", flush=True)
        print()


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
