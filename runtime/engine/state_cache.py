"""StateCache: which slot of recurrent state belongs to whom, and which ones are snapshots.

A recurrent state says nothing about the tokens in the middle, so a prefix can be shared only up to
a point where somebody kept a copy: a snapshot, known by its tokens like a KV page.  Snapshots are
made while a prompt is read, and a sequence that ends leaves its own slot as one.  The least
recently used go first.  Bookkeeping only, no data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runtime.engine.executor import ExecutorLimits
from runtime.engine.kv_cache import ROOT

SPACING = 4096
"""A long text is snapshotted this often: what a prompt that leaves it half-way reads again."""
WORTHWHILE = 256
"""A prompt of fewer tokens is read again rather than cut for a snapshot before its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The state after `n_tokens` tokens: those of the pages up to `parent`, then `tail`."""

    slot: int
    n_tokens: int
    parent: bytes
    tail: tuple[int, ...]


@dataclass(slots=True, eq=False)
class SequenceState:
    """What one sequence has here.

    slot     of its own state
    source   the snapshot that it begins from, kept until `copied`
    making   snapshots of it that are copied before the next step
    made     those that can be found
    """

    slot: int
    source: Snapshot | None = None
    making: list[Snapshot] = field(default_factory=list)
    made: list[Snapshot] = field(default_factory=list)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(from, to) slots to copy before the next step."""
        begin = [] if self.source is None else [(self.source.slot, self.slot)]
        return begin + [(self.slot, snapshot.slot) for snapshot in self.making]


class StateCache:
    """Slots of an executor.  Every method is quick and synchronous."""

    def __init__(
        self,
        n_slots: int,
        n_sequences: int,
        page_tokens: int,
        *,
        keep: bool = True,
        spacing: int,
        worthwhile: int,
    ) -> None:
        """n_sequences: slots that no snapshot takes; keep: whether there are snapshots at all."""
        self._page_tokens = page_tokens
        self._n_snapshots = n_slots - n_sequences if keep else 0
        self._spacing, self._worthwhile = spacing, worthwhile
        self._free = list(range(n_slots - 1, -1, -1))
        self._n_spare = n_slots - n_sequences
        self._n_making = 0
        self._pins: dict[Snapshot, int] = {}
        self._snapshots: OrderedDict[Snapshot, None] = OrderedDict()  # the oldest first
        self._children: dict[bytes, dict[tuple[int, ...], Snapshot]] = {}

    @property
    def n_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def has_room(self) -> bool:
        """Whether one more sequence can have a slot."""
        return len(self._free) + self._n_making + len(self._snapshots) > self._n_spare

    def next_point(self, n_computed: int, n_prompt: int, n_cached: int) -> int:
        """The tokens after which a sequence is snapshotted next; n_cached: what it began with."""
        spaced = n_computed // self._spacing * self._spacing + self._spacing
        # The last token is always computed, for its logits: so a page's end before it.
        last = (n_prompt - 1) // self._page_tokens * self._page_tokens
        before = max(n_cached, (last - 1) // self._spacing * self._spacing)
        if n_computed < last and last - before >= self._worthwhile:
            return min(spaced, last)
        return spaced

    def whole_pages(self, n_computed: int, n_tokens: int, n_prompt: int) -> int:
        """Of the next n_tokens those up to a page's end, or all where they end the prompt.

        Executors may take several tokens of a prompt at a time: then bits do not depend on where it
        is cut only as long as that is between those.
        """
        end = n_computed + n_tokens
        if end < n_prompt:
            end -= end % self._page_tokens
        return max(0, end - n_computed)

    def find(
        self, tokens: Sequence[int], chain: Sequence[bytes], n_tokens: int
    ) -> Iterator[Snapshot]:
        """Snapshots of a beginning of `tokens`, of `n_tokens` at most, the longest first.

        chain: `KVCache.chain_of(tokens)`
        """
        for index in range(min(n_tokens // self._page_tokens, len(chain)), -1, -1):
            start = index * self._page_tokens
            siblings = self._children.get(chain[index - 1] if index else ROOT, {})
            for tail in sorted(siblings, key=len, reverse=True):
                end = start + len(tail)
                if 0 < end <= n_tokens and tuple(tokens[start:end]) == tail:
                    yield siblings[tail]

    def open(self, source: Snapshot | None) -> SequenceState:
        """A slot for a sequence that begins with `source`; only where there is room."""
        state = SequenceState(self._new_slot(), source)
        if source is not None:
            self._pins[source] = self._pins.get(source, 0) + 1
            self._snapshots.move_to_end(source)
        return state

    def snapshot(self, state: SequenceState, chain: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Plan a snapshot of `state`, which is that after `tokens`; chain: of their full pages."""
        key = self._key(chain, tokens)
        if self._known(key) is None and self._make_room():
            state.making.append(Snapshot(self._new_slot(), len(tokens), *key))
            self._n_making += 1

    def copied(self, state: SequenceState) -> None:
        """The copies of `state` are done."""
        self._unpin(state)
        for snapshot in state.making:
            self._n_making -= 1
            self._register(snapshot)
        state.made += state.making
        state.making.clear()

    def abandon(self, state: SequenceState) -> None:
        """The copies of `state` will not be done: it leaves the running ones."""
        self._unpin(state)
        for snapshot in state.making:
            self._n_making -= 1
            self._free.append(snapshot.slot)
        state.making.clear()

    def close(self, state: SequenceState, chain: Sequence[bytes], tokens: Sequence[int]) -> None:
        """The sequence ends: its slot, the state after `tokens`, becomes a snapshot of them."""
        began = state.source is None
        self.abandon(state)
        key = self._key(chain, tokens)
        if began and tokens and self._known(key) is None and self._make_room():
            self._register(Snapshot(state.slot, len(tokens), *key))
        else:
            self._free.append(state.slot)

    def discard(self, state: SequenceState) -> None:
        """The sequence ends, and what it computed must not be found again."""
        self.abandon(state)
        for snapshot in state.made:
            if snapshot in self._snapshots:
                self._unregister(snapshot)
        self._free.append(state.slot)

    def restore(self, chain: Sequence[bytes], tokens: Sequence[int]) -> int | None:
        """A slot to load the state after `tokens` into; None: it is here, or has no room."""
        key = self._key(chain, tokens)
        if self._known(key) is not None or not self._make_room():
            return None
        snapshot = Snapshot(self._new_slot(), len(tokens), *key)
        self._register(snapshot)
        return snapshot.slot

    def forget(self, tokens: Sequence[int], chain: Sequence[bytes]) -> None:
        """Drop every snapshot of a beginning of `tokens` that nobody begins from now."""
        for snapshot in list(self.find(tokens, chain, len(tokens))):
            if snapshot not in self._pins:
                self._unregister(snapshot)

    def _key(self, chain: Sequence[bytes], tokens: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
        n_full = len(tokens) // self._page_tokens
        return chain[n_full - 1] if n_full else ROOT, tuple(tokens[n_full * self._page_tokens :])

    def _known(self, key: tuple[bytes, tuple[int, ...]]) -> Snapshot | None:
        snapshot = self._children.get(key[0], {}).get(key[1])
        if snapshot is not None:
            self._snapshots.move_to_end(snapshot)
        return snapshot

    def _make_room(self) -> bool:
        """Whether there may be one more snapshot, after the oldest had to go."""
        if self._n_making + len(self._snapshots) < self._n_snapshots:
            return True
        oldest = next((s for s in self._snapshots if s not in self._pins), None)
        if oldest is None:
            return False
        self._unregister(oldest)
        return True

    def _new_slot(self) -> int:
        return self._free.pop()

    def _register(self, snapshot: Snapshot) -> None:
        siblings = self._children.setdefault(snapshot.parent, {})
        if snapshot.tail in siblings:  # another sequence was quicker
            self._free.append(snapshot.slot)
            return
        siblings[snapshot.tail] = snapshot
        self._snapshots[snapshot] = None

    def _unregister(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot]
        siblings = self._children[snapshot.parent]
        del siblings[snapshot.tail]
        if not siblings:
            del self._children[snapshot.parent]
        self._free.append(snapshot.slot)

    def _unpin(self, state: SequenceState) -> None:
        if state.source is not None:
            self._pins[state.source] -= 1
            if not self._pins[state.source]:
                del self._pins[state.source]
            state.source = None


def states_of(limits: ExecutorLimits, *, keep: bool) -> StateCache | None:
    """The cache for an executor's slots; None where its model has no recurrent layers."""
    if not limits.n_state_slots:
        return None
    return StateCache(
        limits.n_state_slots,
        limits.max_sequences,
        limits.page_tokens,
        keep=keep,
        spacing=SPACING,
        worthwhile=WORTHWHILE,
    )
