"""Reading what engines over the fake device generate."""

from __future__ import annotations

from contextlib import aclosing

import runtime
from runtime.engine.fake_executor import FakeExecutor

GREEDY = runtime.SamplingParams.greedy


def fake(engine: runtime.Engine) -> FakeExecutor:
    """The engine's fake device."""
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


async def read(
    engine: runtime.Engine,
    prompt: str | list[int],
    params: runtime.SamplingParams | None = None,
    **options: object,
) -> list[runtime.Token]:
    """All items of a request."""
    params = params or GREEDY(max_tokens=12, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params, **options)) as tokens:
        return [token async for token in tokens]


def ids(tokens: list[runtime.Token], index: int = 0) -> list[int | None]:
    return [token.id for token in tokens if token.index == index]


def text(tokens: list[runtime.Token]) -> str:
    return "".join(token.text for token in tokens)
