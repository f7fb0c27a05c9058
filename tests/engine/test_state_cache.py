"""Which slots hold which states: sharing, making room, and what must not be found again."""

from __future__ import annotations

from runtime.engine.kv_cache import KVCache
from runtime.engine.state_cache import SequenceState, StateCache

PAGE = 4
KV = KVCache(8, PAGE)
TEXT = list(range(40))


def cache(n_snapshots: int = 3, n_sequences: int = 2, **settings: int) -> StateCache:
    chosen = {"spacing": 1000, "worthwhile": 8, **settings}
    return StateCache(n_snapshots + n_sequences, n_sequences, PAGE, **chosen)


def ended(states: StateCache, tokens: list[int]) -> SequenceState:
    """A sequence that computed `tokens` and ended."""
    state = states.open(None)
    states.close(state, KV.chain_of(tokens), tokens)
    return state


def lengths(states: StateCache, tokens: list[int], n_tokens: int | None = None) -> list[int]:
    limit = len(tokens) if n_tokens is None else n_tokens
    return [s.n_tokens for s in states.find(tokens, KV.chain_of(tokens), limit)]


def test_a_sequence_that_ends_leaves_its_own_slot_as_a_snapshot() -> None:
    states = cache()
    state = ended(states, TEXT[:10])
    (found,) = states.find(TEXT, KV.chain_of(TEXT), 39)
    assert (found.n_tokens, found.slot) == (10, state.slot)
    follower = states.open(found)
    assert follower.copies == [(found.slot, follower.slot)]


def test_the_longest_beginning_comes_first_and_other_texts_are_not_found() -> None:
    states = cache()
    for n in (8, 10, 5):
        ended(states, TEXT[:n])
    assert lengths(states, TEXT) == [10, 8, 5]
    assert lengths(states, TEXT, 9) == [8, 5]
    assert lengths(states, [*TEXT[:9], 99, *TEXT[10:]]) == [8, 5]
    assert lengths(states, [99, *TEXT[1:]]) == []


def test_the_least_recently_used_snapshot_makes_room() -> None:
    states = cache(n_snapshots=2)
    ended(states, TEXT[:8])
    ended(states, TEXT[:12])
    first = next(iter(states.find(TEXT, KV.chain_of(TEXT), 8)))
    states.copied(states.open(first))  # used: the other one is now the oldest
    ended(states, TEXT[:16])
    assert lengths(states, TEXT) == [16, 8]


def test_a_snapshot_that_somebody_begins_from_stays_until_it_is_copied() -> None:
    states = cache(n_snapshots=1)
    ended(states, TEXT[:8])
    found = next(iter(states.find(TEXT, KV.chain_of(TEXT), 8)))
    follower = states.open(found)
    ended(states, TEXT[:12])
    assert lengths(states, TEXT) == [8]
    states.copied(follower)
    ended(states, TEXT[:12])
    assert lengths(states, TEXT) == [12]


def test_a_snapshot_is_found_only_after_its_copy() -> None:
    states = cache()
    state = states.open(None)
    states.snapshot(state, KV.chain_of(TEXT[:8]), TEXT[:8])
    ((source, target),) = state.copies
    assert source == state.slot != target
    assert lengths(states, TEXT) == []
    states.copied(state)
    assert lengths(states, TEXT) == [8]
    assert state.copies == []


def test_what_a_failed_sequence_made_is_gone() -> None:
    states = cache()
    state = states.open(None)
    states.snapshot(state, KV.chain_of(TEXT[:8]), TEXT[:8])
    states.copied(state)
    states.snapshot(state, KV.chain_of(TEXT[:12]), TEXT[:12])
    states.discard(state)
    assert lengths(states, TEXT) == []
    assert all_slots_can_be_had(states, 2)


def test_a_state_that_never_began_is_no_snapshot() -> None:
    states = cache()
    ended(states, TEXT[:8])
    found = next(iter(states.find(TEXT, KV.chain_of(TEXT), 8)))
    states.close(states.open(found), KV.chain_of(TEXT[:12]), TEXT[:12])
    assert lengths(states, TEXT) == [8]


def test_there_is_always_a_slot_for_as_many_sequences_as_were_promised() -> None:
    states = cache(n_snapshots=2, n_sequences=3)
    for n in range(1, 9):
        assert all_slots_can_be_had(states, 3)
        ended(states, TEXT[:n])


def all_slots_can_be_had(states: StateCache, n_sequences: int) -> bool:
    taken = []
    while states.has_room:
        taken.append(states.open(None))
    for state in taken:
        states.close(state, [], [])
    return len({state.slot for state in taken}) == len(taken) == n_sequences


def test_snapshots_stand_at_the_last_page_before_a_prompts_end_and_at_distances() -> None:
    states = cache(spacing=16, worthwhile=8)
    points, n = [], 0
    while (point := states.next_point(n, 30, 0)) <= 30:
        points.append(point)
        n = point
    assert points == [16, 28]
    assert states.next_point(0, 8, 0) == 16, "a short prompt is not cut"
    assert states.next_point(20, 30, 24) == 32, "little would be read again"
    assert states.next_point(0, 33, 0) == 16
    assert states.next_point(16, 33, 0) == 32


def test_prompts_are_cut_at_pages() -> None:
    states = cache()
    assert states.whole_pages(0, 11, 30) == 8
    assert states.whole_pages(6, 3, 30) == 2
    assert states.whole_pages(9, 2, 30) == 0, "the page does not end here"
    assert states.whole_pages(9, 2, 11) == 2, "the prompt does"


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    states = cache(keep=False)
    ended(states, TEXT[:8])
    assert states.n_snapshots == 0


def test_a_restored_state_is_found_and_a_known_one_is_not_loaded_again() -> None:
    states = cache()
    slot = states.restore(KV.chain_of(TEXT[:10]), TEXT[:10])
    assert [s.slot for s in states.find(TEXT, KV.chain_of(TEXT), 39)] == [slot]
    assert states.restore(KV.chain_of(TEXT[:10]), TEXT[:10]) is None
    states.forget(TEXT, KV.chain_of(TEXT))
    assert lengths(states, TEXT) == []
