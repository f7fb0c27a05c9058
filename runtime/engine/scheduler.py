"""Scheduler: decides the next step.  Pure and synchronous: it moves bookkeeping, never data.

First come, first served.  Prompt chunks and decode steps take turns, so a long prompt delays the
running answers by one chunk at a time.  When KV pages run out, the latest sequence leaves its pages
(their contents go to host memory) and comes back before anything newer starts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import replace

from runtime.engine.executor import ExecutorLimits
from runtime.engine.kv_cache import KVCache, PageTable
from runtime.engine.plan import (
    Load,
    Part,
    Plan,
    Save,
    decode_step,
    previous_tokens,
    state_slots,
    step_of,
    with_states,
)
from runtime.engine.sequence import Sequence, State
from runtime.engine.state_cache import Snapshot, StateCache
from runtime.engine.step import DeviceWork, Step, StepKind
from runtime.errors import EngineBug

# A prompt chunk beside running answers should not delay them longer than this; the chunk never
# shrinks below the smallest batch that still shares the unpacked weights well.
STALL_SECONDS = 0.5
MIN_CHUNK = 32


class Scheduler:
    """Waiting and running sequences, both in the order of arrival, and the pages they share."""

    def __init__(
        self,
        limits: ExecutorLimits,
        kv: KVCache,
        *,
        n_batch: int,
        n_ctx_sequence: int,
        states: StateCache | None = None,
    ) -> None:
        """n_batch: tokens of a prompt chunk; n_ctx_sequence: tokens a sequence may have at most;
        states: of a model with recurrent layers.

        Raises: EngineBug where one sequence alone could outgrow the pages.
        """
        self._max_pages = kv.pages_for(n_ctx_sequence)
        if self._max_pages > kv.n_pages:
            raise EngineBug(f"{kv.n_pages} pages cannot hold {n_ctx_sequence} tokens")
        self.kv = kv
        self.states = states
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.n_preemptions = 0
        self._n_previous = limits.n_previous
        self._n_batch = min(n_batch, limits.max_step_tokens)
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._is_full = False  # nothing has changed since those that wait found no room
        self._behind: Plan | None = None  # of a step that began before its tokens were known
        self._leaving: set[Sequence] = set()  # ended, and that step reads their last token
        self._last_kind = StepKind.DECODE
        self._prompt_rate = 0.0  # tokens per second of the last prompt step

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._is_full = False
        insort(self.waiting, sequence, key=_arrival)

    def next_step(self) -> Plan:
        """Let sequences go and come, and say what to compute now."""
        saves = self._make_room()
        loads = self._admit() if self.waiting and not saves else []
        kind, parts = self._choose()
        self._last_kind = kind
        copies = tuple([copy for s in self.running for copy in s.pages.copies])
        step = step_of(kind, parts, copies) if parts else None
        if step is not None and self.states is not None:
            step = with_states(step, parts, self.running)
        if step is not None and self._n_previous:
            step = replace(step, previous_tokens=previous_tokens(parts, self._n_previous))
        return Plan(tuple(saves), tuple(loads), tuple(parts), step)

    def following(
        self,
        plan: Plan,
        ends: Callable[[Sequence], bool],
        work_of: Callable[[Sequence, int], DeviceWork | None],
    ) -> Plan | None:
        """The decode step behind that of `plan`, which is in flight and chooses its own tokens.

        ends: whether the token that `plan` brings is surely the sequence's last.  A sequence that
        ends with it unforeseen has a surplus token here: `commit` passes over it, so that nothing
        knows of its KV.  work_of: what chooses a sequence's token for a position.  None where
        something else has to come first, or there is no such work.
        """
        if self.waiting and not self._is_full:
            return None
        if plan.step is None or plan.step.kind is not StepKind.DECODE:
            return None
        parts: list[Part] = []
        outputs: list[int] = []
        works: list[DeviceWork] = []
        n_here = 0
        for row, part in enumerate(plan.parts):
            sequence = part.sequence
            if sequence.is_over:
                continue
            n_here += 1
            if part.start + 1 == self._next_point(sequence, part.start):
                return None  # its state is copied before it moves on
            if ends(sequence):
                continue
            work = work_of(sequence, part.start + 2)
            if work is None or not self.kv.grow(sequence.pages, part.start + 2):
                return None
            parts.append(Part(sequence, part.start + 1, 1, True))
            outputs.append(-1 - row)
            works.append(work)
        if not parts or n_here < len(self.running):
            return None
        step = decode_step(parts, outputs, sampling=tuple(works), follows=True)
        if self.states is not None:
            step = replace(step, state_slots=state_slots(parts))
        if self._n_previous:  # the tokens of the step in flight are known, what it chooses is not
            step = replace(step, previous_tokens=previous_tokens(parts, self._n_previous))
        return Plan((), (), tuple(parts), step)

    def began_behind(self, plan: Plan) -> None:
        """The step of `plan`, which is one that `following` gave, is in flight."""
        self._behind = plan

    def spoil(self, sequence: Sequence) -> None:
        """The step that reads the last token of a sequence that has ended gave no numbers."""
        if sequence in self._leaving:
            self._leave(sequence, sequence.n_computed, is_state_known=False)

    def commit(self, plan: Plan, seconds: float) -> list[tuple[int, Sequence]]:
        """The step of `plan` was done in `seconds`.

        Returns (row of the logits, sequence) for every sequence that gets a token.
        """
        if plan.step is None:
            raise EngineBug("a plan without a step was committed")
        if plan.step.kind is StepKind.PREFILL and seconds > 0:
            self._prompt_rate = plan.step.n_tokens / seconds
        for sequence in self.running:
            self.kv.copied(sequence.pages)
            if self.states is not None and sequence.recurrent is not None:
                self.states.copied(sequence.recurrent)
        if plan is self._behind:
            self._behind = None
        ready: list[tuple[int, Sequence]] = []
        row = 0
        for part in plan.parts:
            sequence = part.sequence
            if sequence in self._leaving:
                self._leave(sequence, part.start + part.n_tokens)
            elif not sequence.is_over:  # else its part of the step failed
                sequence.n_computed = part.start + part.n_tokens
                at_point = part.start + part.n_tokens == self._next_point(sequence, part.start)
                self.kv.record(sequence.pages, sequence.tokens, sequence.n_computed)
                if at_point:
                    self._snapshot(sequence)
                if sequence.state is State.PREFILL and sequence.has_prompt:
                    sequence.move(State.DECODE)
                if part.wants_logits:
                    ready.append((row, sequence))
            row += part.wants_logits
        return ready

    def alone(self, plan: Plan) -> list[tuple[Part, Step]]:
        """The step of `plan` as one step per sequence, for a step that failed as a whole."""
        kind = StepKind.DECODE if plan.step is None else plan.step.kind
        copies = () if plan.step is None else plan.step.page_copies
        steps = []
        for part in plan.parts:
            own = {page for _, page in part.sequence.pages.copies}
            kept = tuple(copy for copy in copies if copy[1] in own)
            steps.append((part, step_of(kind, [part], kept)))
        return steps

    def end(self, sequence: Sequence, state: State, *, poisoned: bool = False) -> None:
        """Take a sequence out.  poisoned: its KV cannot be trusted."""
        self._is_full = False
        sequence.move(state)
        sequence.images.clear()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._end_state(sequence, sequence.n_computed, poisoned=poisoned)
            return
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        if not poisoned and self._is_read_behind(sequence):
            self._leaving.add(sequence)
            return
        self._end_state(sequence, sequence.n_computed, poisoned=poisoned)
        self.kv.close(sequence.pages, poisoned=poisoned)
        sequence.table = None

    def _is_read_behind(self, sequence: Sequence) -> bool:
        """Whether a step in flight moves its state on, over the token that it ended with."""
        if self.states is None or self._behind is None:
            return False
        return any(part.sequence is sequence for part in self._behind.parts)

    def _leave(self, sequence: Sequence, n_read: int, *, is_state_known: bool = True) -> None:
        """Nothing moves the state of a sequence that has ended any more: n_read tokens are in it,
        and in the pages."""
        self._leaving.remove(sequence)
        self._is_full = False
        if is_state_known:
            self.kv.record(sequence.pages, sequence.tokens, n_read)
        self._end_state(sequence, n_read if is_state_known else 0, poisoned=False)
        self.kv.close(sequence.pages)
        sequence.table = None

    def _make_room(self) -> list[Save]:
        """A page for every answer's next token; where none is left the latest sequences leave."""
        saves: list[Save] = []
        for sequence in self.running[:]:
            while sequence.state is State.DECODE and not self.kv.grow(
                sequence.pages, sequence.n_computed + 1
            ):
                saves.append(self._preempt(self.running[-1]))
        return saves

    def _preempt(self, sequence: Sequence) -> Save:
        if len(self.running) == 1:
            raise EngineBug(f"{sequence!r} has the pool for itself and does not fit")
        sequence.move(State.WAITING)
        self._is_full = False
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        n_pages = self.kv.pages_for(sequence.n_computed)
        save = Save(sequence, tuple(sequence.pages.pages[:n_pages]))
        if self.states is not None and sequence.recurrent is not None:
            self.states.abandon(sequence.recurrent)
        sequence.saved = self.kv.save(sequence.pages, sequence.n_computed)
        sequence.table = None
        insort(self.waiting, sequence, key=_arrival)
        self.n_preemptions += 1
        return save

    def _admit(self) -> list[Load]:
        loads = []
        self._is_full = True  # whoever still waits after this
        for sequence in list(self.waiting):
            if not self._free_slots:
                break
            leader = sequence.leader
            if leader is not None and not (leader.is_over or leader.has_prompt):
                continue  # its prompt is on the way
            # Room for the others' next pages, or the newcomer would be thrown out at once.
            spare = sum(len(s.pages.pages) < self._max_pages for s in self.running)
            load = self._open(sequence, spare)
            if load is None:
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_arrival)
            sequence.slot = self._free_slots.pop()
            loads.append(load)
        return [load for load in loads if load.indices]

    def _open(self, sequence: Sequence, spare: int) -> Load | None:
        """Pages for a waiting sequence, or None where they are missing."""
        saved = sequence.saved
        if saved is None:
            if sequence.prompt_chain is None and sequence.reuse_prefix:
                leader = sequence.leader
                known = leader.prompt_chain if leader else None
                sequence.prompt_chain = known or self.kv.chain_of(sequence.tokens)
            table = self._open_table(sequence, spare)
            if table is None:
                return None
            sequence.table = table
            sequence.n_computed = sequence.n_cached = table.n_cached
            sequence.move(State.PREFILL)
            return Load(sequence, (), ())
        n_reserve = max(saved.n_tokens, sequence.n_prompt) + 1
        reopened = self.kv.reopen(saved, sequence.tokens, n_reserve=n_reserve, spare=spare)
        if reopened is None:
            return None
        sequence.table, missing = reopened
        sequence.saved = None
        sequence.move(State.DECODE if sequence.n_generated else State.PREFILL)
        return Load(sequence, tuple(missing), tuple(sequence.table.pages[i] for i in missing))

    def _open_table(self, sequence: Sequence, spare: int) -> PageTable | None:
        """The pages of a new sequence, and its state, which says how many tokens it can share."""
        tokens, chain = sequence.tokens, sequence.prompt_chain or []

        def opened(limit: int | None) -> PageTable | None:
            return self.kv.open(
                tokens,
                n_reserve=sequence.n_prompt + 1,
                chain=sequence.prompt_chain,
                spare=spare,
                reuse=sequence.reuse_prefix,
                limit=limit,
            )

        if self.states is None:
            return opened(None)
        if not self.states.has_room:
            return None
        snapshots: list[Snapshot | None] = [None]
        if sequence.reuse_prefix:
            n_known = min(self.kv.lookup(tokens, chain)[1], len(tokens) - 1)
            snapshots = [*self.states.find(tokens, chain, n_known), None]
        for snapshot in snapshots:
            n_tokens = 0 if snapshot is None else snapshot.n_tokens
            table = opened(n_tokens)
            if table is None:
                return None
            if table.n_cached == n_tokens:
                sequence.recurrent = self.states.open(snapshot)
                return table
            self.kv.close(table)  # the page that it ends in is gone, and has no room for a copy
        return None

    def _next_point(self, sequence: Sequence, start: int) -> int:
        """Where a part that starts at `start` has to end, to keep its state; 0: anywhere."""
        if self.states is None:
            return 0
        return self.states.next_point(start, sequence.n_prompt, sequence.n_cached)

    def _snapshot(self, sequence: Sequence) -> None:
        if self.states is not None and sequence.recurrent is not None:
            tokens = sequence.tokens[: sequence.n_computed]
            self.states.snapshot(sequence.recurrent, sequence.pages.chain, tokens)

    def _end_state(self, sequence: Sequence, n_read: int, *, poisoned: bool) -> None:
        """n_read: tokens that its state has seen; where not all of them are known it is lost."""
        state, sequence.recurrent = sequence.recurrent, None
        if self.states is None or state is None:
            return
        if poisoned:
            self.states.discard(state)
        elif sequence.table is None or len(sequence.tokens) < n_read:  # preempted, or cancelled
            self.states.close(state, [], [])
        else:
            self.states.close(state, sequence.pages.chain, sequence.tokens[:n_read])

    def _choose(self) -> tuple[StepKind, list[Part]]:
        """Kind and parts of the next step; prompt chunks and decode steps take turns."""
        prompts = [s for s in self.running if s.state is State.PREFILL]
        answers = [s for s in self.running if s.state is State.DECODE]
        if prompts and not (answers and self._last_kind is StepKind.PREFILL):
            return StepKind.PREFILL, self._chunk(prompts, beside=bool(answers))
        return StepKind.DECODE, [Part(s, s.n_computed, 1, True) for s in answers]

    def _chunk(self, prompts: list[Sequence], *, beside: bool) -> list[Part]:
        budget = self._n_batch
        if beside and self._prompt_rate:
            budget = min(budget, max(int(self._prompt_rate * STALL_SECONDS), MIN_CHUNK))
        parts: list[Part] = []
        for sequence in prompts:
            n_tokens = min(budget, sequence.n_prompt - sequence.n_computed)
            point = self._next_point(sequence, sequence.n_computed)
            if point:
                n_tokens = min(n_tokens, point - sequence.n_computed)
            if self.states is not None:
                start, n_prompt = sequence.n_computed, sequence.n_prompt
                whole = self.states.whole_pages(start, n_tokens, n_prompt)
                n_tokens = n_tokens if whole == 0 and not parts else whole
            if n_tokens:
                end = sequence.n_computed + n_tokens
                is_last = end == len(sequence.tokens)
                parts.append(Part(sequence, sequence.n_computed, n_tokens, is_last))
            budget -= n_tokens
        return parts


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
