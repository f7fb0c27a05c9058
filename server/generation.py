"""Running one request's generations, and collecting what they give.

`running` starts one reader per prompt and puts everything into one queue: tokens, prompt progress,
errors. A handler takes from the queue at its client's pace; the sequences themselves never wait for
a client. Leaving the block, for whatever reason, frees the sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from runtime import Timings, Token
from runtime.engine.token import PromptProgress
from server.errors import Unavailable
from server.requests import Wishes
from server.service import Service


@dataclass
class Answer:
    """One completion as far as it has come; `index` counts over all prompts of the request.

    tokens   all of them where `keeps_tokens`, else only the last: a stream has sent the others
    """

    index: int
    keeps_tokens: bool
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    n_items: int = 0
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add(self, token: Token) -> None:
        if self.n_items == 0:
            self.first = time.perf_counter()
        self.n_items += 1
        self.pieces.append(token.text)
        if not self.keeps_tokens:
            self.tokens.clear()
        self.tokens.append(token)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def last(self) -> Token:
        return self.tokens[-1]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens if token.id is not None]

    @property
    def timings(self) -> Timings:
        """The engine's figures at the end, until then our own clock's."""
        last = self.last
        if last.timings is not None:
            return last.timings
        return Timings(
            cache_n=last.n_cached,
            prompt_n=last.n_prompt - last.n_cached,
            prompt_ms=1e3 * (self.first - self.started),
            predicted_n=last.n_generated,
            predicted_ms=1e3 * (time.perf_counter() - self.first),
        )


@dataclass(frozen=True)
class PromptState:
    """How far a prompt is read, as `prompt_progress` tells it."""

    index: int
    total: int
    cache: int
    processed: int
    time_ms: float


class Signal(Enum):
    """What is not a result: nothing came for a while, or nothing will come."""

    SILENCE = auto()
    END = auto()


Event = Answer | PromptState


class Events:
    """What a request's generations gave, in order of time."""

    def __init__(self, n_prompts: int, wishes: Wishes) -> None:
        self._queue: asyncio.Queue[tuple[int, Token] | PromptState | Exception | None] = (
            asyncio.Queue()
        )
        self._n_reading = n_prompts
        self.answers = [
            Answer(index, keeps_tokens=not wishes.stream) for index in range(n_prompts * wishes.n)
        ]

    def put(self, item: tuple[int, Token] | PromptState | Exception | None) -> None:
        self._queue.put_nowait(item)

    async def next(self, wait: float | None = None) -> Event | Signal:
        """The answer that has just grown, or a prompt's state; SILENCE after `wait` seconds without
        one.

        Raises: whatever ended a generation.
        """
        while True:
            try:
                item = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    async with asyncio.timeout(wait):
                        item = await self._queue.get()
                except TimeoutError:
                    return Signal.SILENCE
            if isinstance(item, Exception):
                raise item
            if isinstance(item, PromptState):
                return item
            if item is not None:
                answer = self.answers[item[0]]
                answer.add(item[1])
                return answer
            self._n_reading -= 1
            if not self._n_reading:
                return Signal.END

    async def finish(self) -> list[Answer]:
        """Everything to the end.  Raises: what ended a generation."""
        while await self.next() is not Signal.END:
            pass
        return self.answers


@asynccontextmanager
async def running(
    service: Service, prompts: Sequence[str | list[int]], wishes: Wishes
) -> AsyncIterator[Events]:
    """Generate `wishes.n` answers for each prompt; leaving the block frees them all."""
    events = Events(len(prompts), wishes)
    readers = [
        asyncio.create_task(
            _read(service, prompt, wishes, number * wishes.n, events), name=f"answer {number}"
        )
        for number, prompt in enumerate(prompts)
    ]
    watcher = asyncio.create_task(_watch_closing(service, events), name="watch for closing")
    service.n_open_requests += 1
    try:
        yield events
    finally:
        service.n_open_requests -= 1
        for task in (*readers, watcher):
            task.cancel()
        await asyncio.gather(*readers, watcher, return_exceptions=True)


async def _read(
    service: Service, prompt: str | list[int], wishes: Wishes, offset: int, events: Events
) -> None:
    def progress(state: PromptProgress) -> None:
        events.put(_prompt_state(state, offset))

    try:
        tokens = service.engine.generate(
            prompt,
            wishes.params,
            n=wishes.n,
            reuse_prefix=wishes.reuse_prefix,
            special=wishes.special,
            on_progress=progress if wishes.return_progress else None,
        )
        async with aclosing(tokens):
            async for token in tokens:
                events.put((offset + token.index, token))
        events.put(None)
    except Exception as error:
        # Carried to the handler: it becomes the response or the last event of the stream.
        events.put(error)


def _prompt_state(state: PromptProgress, offset: int) -> PromptState:
    return PromptState(
        offset + state.index, state.n_total, state.n_cached, state.n_processed, state.ms
    )


async def _watch_closing(service: Service, events: Events) -> None:
    """After SIGTERM an answer may go on for a moment, then ends with a readable error."""
    await service.closing.wait()
    await asyncio.sleep(service.settings.closing_seconds)
    events.put(Unavailable("the server is closing"))
