"""Sequence: one answer's tokens and state; TokenChannel: how its items reach the caller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as TokenIds
from enum import Enum, auto

from runtime.engine.kv_cache import PageTable, SavedPages
from runtime.engine.state_cache import SequenceState
from runtime.engine.token import Token
from runtime.errors import EngineBug


class State(Enum):
    WAITING = auto()  # in the queue: new, or preempted with its pages saved
    PREFILL = auto()  # its prompt is being computed
    DECODE = auto()  # one token per step
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


MOVES = {
    State.WAITING: {State.PREFILL, State.DECODE, State.CANCELLED, State.FAILED},
    State.PREFILL: {
        State.DECODE,
        State.WAITING,
        State.FINISHED,
        State.CANCELLED,
        State.FAILED,
    },
    State.DECODE: {State.FINISHED, State.CANCELLED, State.FAILED, State.WAITING},
    State.FINISHED: set(),
    State.CANCELLED: set(),
    State.FAILED: set(),
}


class Sequence:
    """What the scheduler knows of one answer.

    arrival     running number, the order of fairness
    tokens      prompt, then what was generated; the first n_computed have their KV in `table`
    leader      the sequence that computes the same prompt (n > 1): wait for it, then share its
                pages
    is_over     finished, cancelled or failed
    slot        place among the parallel sequences; the last one where it does not run
    prompt_chain   what the pages of the prompt are found by, once it is known
    saved, images   where its KV is while it waits preempted; images holds one host copy per page
    recurrent   its state beside the KV, which keeps its slot while the sequence waits preempted;
                None: it has not begun, or the model has none
    """

    def __init__(
        self,
        arrival: int,
        prompt: TokenIds[int],
        *,
        leader: Sequence | None = None,
        reuse_prefix: bool = True,
    ) -> None:
        self.arrival = arrival
        self.tokens = list(prompt)
        self.n_prompt = len(self.tokens)
        self.leader = leader
        self.reuse_prefix = reuse_prefix
        self.n_computed = 0
        self.n_cached = 0
        self.slot = 0
        self.prompt_chain: list[bytes] | None = None
        self.table: PageTable | None = None
        self.saved: SavedPages | None = None
        self.images: list[bytes] = []
        self.recurrent: SequenceState | None = None
        self.cancel_wanted = False
        self.is_over = False
        self._state = State.WAITING

    @property
    def state(self) -> State:
        return self._state

    @property
    def has_prompt(self) -> bool:
        """Whether the KV of the whole prompt is computed."""
        return self.n_computed >= self.n_prompt

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def pages(self) -> PageTable:
        """Its page table while it runs."""
        if self.table is None:
            raise EngineBug(f"{self!r} has no pages")
        return self.table

    def move(self, to: State) -> None:
        """Enter state `to`; any other way of changing state is a bug."""
        if to not in MOVES[self._state]:
            raise EngineBug(f"{self!r} cannot become {to.name}")
        self._state = to
        self.is_over = not MOVES[to]

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.arrival} {self._state.name}: "
            f"{self.n_computed} of {len(self.tokens)} tokens computed>"
        )


class TokenChannel:
    """Carries the items of one request from the step loop to its caller; both on one event loop."""

    def __init__(self) -> None:
        self._items: deque[Token | Exception] = deque()
        self._waiting: asyncio.Future[None] | None = None  # the caller, where it has read all

    def put(self, item: Token | Exception) -> None:
        """Queue an item; the caller's `get` raises an error after the items before it."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> Token:
        """The next item; one caller at a time.  Raises: the error that came instead."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item
