"""FakeExecutor: pretends to compute, so that all around an executor can be tested.

Its KV pages hold the tokens and positions that were written to them, its states what they have
seen, and its logits are a pure function of what a sequence's page table and state lead to.  A
mixed-up page, a wrong position or a lost copy changes the text.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from runtime.engine.executor import ExecutorLimits
from runtime.engine.step import F32, Step, StepKind, StepResult
from runtime.errors import ComputeError, EngineBug

EMPTY = -1  # what an unwritten cell holds
# The next token a fake model should choose after these tokens; None: whatever the hash says.
NextToken = Callable[[list[int]], int | None]


class Gate:
    """Holds steps back until a test lets them go."""

    def __init__(self) -> None:
        self._allowed = asyncio.Semaphore(0)
        self._is_open = False
        self._waiting = asyncio.Semaphore(0)

    async def reached(self) -> None:
        """Wait until one more step stands at the gate."""
        await self._waiting.acquire()

    def release(self, n_steps: int = 1) -> None:
        """Let `n_steps` steps pass."""
        for _ in range(n_steps):
            self._allowed.release()

    def open(self) -> None:
        """Let every step pass from now on."""
        self._is_open = True
        self._allowed.release()

    async def wait(self) -> None:
        """The executor's side: pass, or stand here."""
        self._waiting.release()
        await self._allowed.acquire()
        if self._is_open:
            self._allowed.release()


class FakeExecutor:
    """An Executor over NumPy pages of tokens.

    steps        every step it was given, in order, where `keep_steps` is set;  n_steps: how many
    is_running   whether it is at work on one
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        bias: F32 | None = None,
        next_token: NextToken | None = None,
    ) -> None:
        """bias: f32[n_vocab] added to all logits (tokens a fake model likes)."""
        self.steps: list[Step] = []
        self.keep_steps = False
        self.n_steps = 0
        self.next_token = next_token
        self.is_closed = False
        self.is_running = False
        self._limits = limits
        self._bias = np.zeros(limits.n_vocab, np.float32) if bias is None else bias
        # i32[n_pages, page_tokens, 2]: token, position
        self._cells = np.full((limits.n_pages, limits.page_tokens, 2), EMPTY, dtype=np.int32)
        # Of each slot: how many tokens its state has seen, and the digest of them.
        self._states = [(EMPTY, b"") for _ in range(limits.n_state_slots)]
        self._gate: Gate | None = None
        self._fail_if: Callable[[Step], bool] | None = None
        self._error: BaseException | None = None

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    @contextmanager
    def hold(self) -> Iterator[Gate]:
        """Hold every step at the gate until it is released or the block ends."""
        self._gate = gate = Gate()
        try:
            yield gate
        finally:
            self._gate = None
            gate.open()

    def fail_when(self, condition: Callable[[Step], bool] | None) -> None:
        """Answer steps for which `condition` holds with ComputeError."""
        self._fail_if = condition

    def break_down(self, error: BaseException) -> None:
        """Raise `error` from every step: the executor itself is broken."""
        self._error = error

    def corrupt_page(self, page: int) -> None:
        """Overwrite what `page` holds."""
        self._cells[page, :, 0] ^= 1

    async def run(self, step: Step) -> StepResult:
        if self.is_running or self.is_closed:
            raise EngineBug("a step came while another was running, or after the end")
        self.is_running = True
        try:
            await asyncio.sleep(0)
            if self._gate is not None:
                await self._gate.wait()
            return self._perform(step)
        finally:
            self.is_running = False

    def save_pages(self, pages: list[int]) -> bytes:
        self._refuse_to_block("save_pages")
        return self._cells[pages].tobytes()

    def load_pages(self, pages: list[int], image: bytes) -> None:
        self._refuse_to_block("load_pages")
        shape = (len(pages), *self._cells.shape[1:])
        self._cells[pages] = np.frombuffer(image, dtype=np.int32).reshape(shape)

    def save_state(self, slot: int) -> bytes:
        self._refuse_to_block("save_state")
        n_tokens, digest = self._states[slot]
        return n_tokens.to_bytes(4, "little", signed=True) + digest

    def load_state(self, slot: int, image: bytes) -> None:
        self._refuse_to_block("load_state")
        self._states[slot] = (int.from_bytes(image[:4], "little", signed=True), image[4:])

    def describe(self) -> dict[str, object]:
        return {"device": "fake", "n_pages": self._limits.n_pages}

    async def close(self) -> None:
        self.is_closed = True

    def _perform(self, step: Step) -> StepResult:
        self.n_steps += 1
        if self.keep_steps:
            self.steps.append(step)
        if self._error is not None:
            raise self._error
        self._check(step)
        for source, target in step.page_copies:
            self._cells[target] = self._cells[source]
        size = self._limits.page_tokens
        self._check_previous(step)
        pages = step.page_tables[step.rows, step.positions // size]
        self._cells[pages, step.positions % size] = np.stack(
            (step.token_ids, step.positions), axis=1
        )
        states = self._advance(step)
        failed = self._fail_if is not None and self._fail_if(step)
        if failed and step.state_slots is None:
            raise ComputeError("the fake device was told to fail")
        logits = np.stack(
            [self._logits(step, token, states.get(token, b"")) for token in step.output_tokens]
            or [np.empty(self._limits.n_vocab, np.float32)]
        )
        n_outputs = len(step.output_tokens)
        return StepResult(logits[:n_outputs], tuple(range(n_outputs)) if failed else ())

    def _advance(self, step: Step) -> dict[int, bytes]:
        """Move the states over the step's tokens; the digest after each token.

        Raises: EngineBug where a state is not that of the token before.
        """
        after: dict[int, bytes] = {}
        if step.state_slots is None:
            return after
        for source, target in step.state_copies:
            self._states[target] = self._states[source]
        for token, row in enumerate(step.rows):
            slot, position = step.state_slots[row], int(step.positions[token])
            n_tokens, digest = self._states[slot] if position else (0, b"")
            if n_tokens != position:
                raise EngineBug(f"the state at position {position} is that after {n_tokens} tokens")
            content = digest + step.token_ids[token].tobytes()
            after[token] = hashlib.blake2b(content, digest_size=8).digest()
            self._states[slot] = (position + 1, after[token])
        return after

    def _logits(self, step: Step, token: int, state: bytes) -> F32:
        size, n_tokens = self._limits.page_tokens, int(step.positions[token]) + 1
        table = step.page_tables[step.rows[token]]
        cells = self._cells[table[: -(-n_tokens // size)]].reshape(-1, 2)[:n_tokens]
        digest = hashlib.blake2b(cells.tobytes() + state, digest_size=8).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        logits = generator.standard_normal(self._limits.n_vocab, dtype=np.float32) + self._bias
        wanted = self.next_token(cells[:, 0].tolist()) if self.next_token else None
        if wanted is not None:
            logits[wanted] = logits.max() + 100
        return logits

    def _check(self, step: Step) -> None:
        """What every executor may rely on.  Raises: EngineBug."""
        limits = self._limits
        n_tokens, n_sequences = step.n_tokens, len(step.page_tables)
        size = limits.page_tokens
        if not 0 < n_tokens <= limits.max_step_tokens or n_sequences > limits.max_sequences:
            raise EngineBug(f"a step of {n_tokens} tokens and {n_sequences} sequences")
        slots = step.state_slots
        if (slots is None) != (limits.n_state_slots == 0):
            raise EngineBug("a step has state slots if and only if the model has states")
        if slots is not None and len(set(slots.tolist())) != n_sequences:
            raise EngineBug("a step has one state slot of its own for each sequence")
        if step.kind is StepKind.DECODE and n_tokens != n_sequences:
            raise EngineBug("a decode step has one token per sequence")
        if step.token_ids.min() < 0 or step.token_ids.max() >= limits.n_vocab:
            raise EngineBug("a step has tokens outside the vocabulary")
        same = step.rows[1:] == step.rows[:-1]
        steps = np.where(same, step.positions[1:] - step.positions[:-1], 1)
        if (np.diff(step.rows) < 0).any() or (steps != 1).any():
            raise EngineBug("the tokens of a sequence do not stand together in ascending order")
        pages = step.page_tables[step.rows, step.positions // size]
        cells: NDArray[np.int64] = pages.astype(np.int64) * size + step.positions % size
        if pages.min() < 0 or pages.max() >= limits.n_pages or len(set(cells)) != n_tokens:
            raise EngineBug("a step writes outside the pages, or twice to one place")

    def _check_previous(self, step: Step) -> None:
        """Raises: EngineBug where the tokens before a part are not those in its pages."""
        n, size = self._limits.n_previous, self._limits.page_tokens
        before = step.previous_tokens
        if (before is None) != (n == 0):
            raise EngineBug("a step has tokens before its own if and only if the model reads them")
        if before is None:
            return
        starts = np.searchsorted(step.rows, np.arange(len(step.page_tables)))
        for row, start in enumerate(step.positions[starts]):
            at = start - 1 - np.arange(n)
            cells = self._cells[step.page_tables[row, np.maximum(at, 0) // size], at % size, 0]
            if not np.array_equal(np.where(at < 0, -1, cells), before[row]):
                raise EngineBug(f"{before[row]} are not the tokens before position {start}")

    def _refuse_to_block(self, verb: str) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise EngineBug(f"{verb} would block the event loop: call it from a thread")
