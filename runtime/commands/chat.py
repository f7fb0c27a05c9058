"""Chat: a conversation with one engine; knows nothing of terminals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime import Engine, SamplingParams, Timings, Token

Message = dict[str, object]


class Chat:
    """Messages so far.  `system` stands first and survives `clear`."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self.timings: Timings | None = None
        self._engine = engine
        self._params = params
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forget the conversation."""
        self.messages = [] if self._system is None else [_message("system", self._system)]

    def drop_answer(self) -> bool:
        """Take back the last answer, so that `answer` gives another; False where there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def say(self, text: str) -> None:
        """Append the user's message."""
        self.messages.append(_message("user", text))

    async def answer(self) -> AsyncIterator[str]:
        """The next answer, piece by piece.  What came of it is kept when the reader stops early."""
        prompt = await self._engine.chat_prompt(self.messages)
        said = ""
        self.timings = None
        tokens = self._engine.generate(prompt, self._params)
        try:
            async for token in tokens:
                said += token.text
                self.timings = token.timings or self.timings
                if token.text:
                    yield token.text
        finally:
            self.messages.append(_message("assistant", said))
            await close(tokens)


async def close(tokens: AsyncIterator[Token]) -> None:
    """Free the sequence of a reader that stops early."""
    end = getattr(tokens, "aclose", None)
    if end is not None:
        await end()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
