"""Several prompts at once: they share every step.  Usage: python examples/many.py [MODEL.gguf]"""

from __future__ import annotations

import asyncio
import sys

import runtime

PROMPTS = ["The sea is", "A compiler is", "In the beginning", "def main():"]


async def answer(engine: runtime.Engine, prompt: str) -> str:
    """The whole text of one answer."""
    params = runtime.SamplingParams(max_tokens=24, seed=1)
    return "".join([token.text async for token in engine.generate(prompt, params)])


async def main(model: str | None) -> None:
    """Answer all prompts together and print them in order."""
    async with runtime.open_engine(runtime.EngineConfig(model=model)) as engine:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(engine, prompt)) for prompt in PROMPTS]
        for prompt, task in zip(PROMPTS, answers, strict=True):
            print(prompt + task.result(), end="\n\n")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
