"""What the scheduler decides, step by step, without any device."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.engine.executor import ExecutorLimits
from runtime.engine.kv_cache import KVCache
from runtime.engine.plan import Plan
from runtime.engine.scheduler import MIN_CHUNK, Scheduler
from runtime.engine.sequence import Sequence, State
from runtime.engine.step import DeviceWork, Step, StepKind
from runtime.errors import EngineBug

PAGE = 4


def scheduler(
    n_pages: int = 64, max_sequences: int = 4, n_batch: int = 8, n_ctx: int | None = None
) -> Scheduler:
    limits = ExecutorLimits(
        n_vocab=100,
        n_pages=n_pages,
        page_tokens=PAGE,
        max_step_tokens=max(n_batch, max_sequences),
        max_sequences=max_sequences,
    )
    kv = KVCache(n_pages, PAGE)
    return Scheduler(limits, kv, n_batch=n_batch, n_ctx_sequence=n_ctx or n_pages * PAGE)


def prompt(arrival: int, n_tokens: int, first: int | None = None) -> Sequence:
    """A sequence whose prompt shares nothing with the others (unless `first` says so)."""
    start = 10 * arrival if first is None else first
    return Sequence(arrival, [start, *range(n_tokens - 1)])


def step_of(plan: Plan) -> Step:
    assert plan.step is not None
    return plan.step


def advance(s: Scheduler, seconds: float = 0.0, token: int = 7) -> Plan:
    """Plan a step, commit it, and give every sequence that wants one a token."""
    plan = s.next_step()
    for save in plan.saves:
        save.sequence.images = [b"page"] * len(save.pages)
    if plan.step is not None:
        for _, sequence in s.commit(plan, seconds):
            sequence.tokens.append(token)
    return plan


def shape(plan: Plan) -> tuple[StepKind, list[tuple[int, int]]]:
    return step_of(plan).kind, [(part.sequence.arrival, part.n_tokens) for part in plan.parts]


def test_nothing_to_do_is_no_step() -> None:
    assert scheduler().next_step().step is None


def test_a_prompt_is_read_in_chunks_and_only_its_end_gives_logits() -> None:
    s = scheduler(n_batch=8)
    s.add(prompt(1, 18))

    plans = [advance(s) for _ in range(3)]

    assert [step_of(plan).n_tokens for plan in plans] == [8, 8, 2]
    assert [step_of(plan).output_tokens.tolist() for plan in plans] == [[], [], [1]]
    assert step_of(plans[1]).positions.tolist() == list(range(8, 16))
    assert shape(advance(s)) == (StepKind.DECODE, [(1, 1)])


def test_several_short_prompts_share_a_step_in_order_of_arrival() -> None:
    s = scheduler(n_batch=8)
    for arrival in (1, 2, 3):
        s.add(prompt(arrival, 3))

    assert shape(advance(s)) == (StepKind.PREFILL, [(1, 3), (2, 3), (3, 2)])
    assert shape(advance(s)) == (StepKind.DECODE, [(1, 1), (2, 1)])
    assert shape(advance(s)) == (StepKind.PREFILL, [(3, 1)])


def test_decode_steps_and_prompt_chunks_take_turns() -> None:
    s = scheduler(n_batch=8)
    s.add(prompt(1, 4))
    advance(s)
    s.add(prompt(2, 24))

    kinds = [step_of(advance(s)).kind for _ in range(6)]

    prefill, decode = StepKind.PREFILL, StepKind.DECODE
    assert kinds == [decode, prefill, decode, prefill, decode, prefill]


def test_a_slow_prompt_is_read_in_smaller_chunks_beside_an_answer() -> None:
    s = scheduler(n_batch=512, n_pages=600)
    s.add(prompt(1, 512))
    advance(s, seconds=512 / 100)  # 100 tokens a second: half a second is 50 tokens
    s.add(prompt(2, 1000))
    advance(s)

    assert shape(advance(s, seconds=50 / 20)) == (StepKind.PREFILL, [(2, 50)])
    advance(s)
    assert shape(advance(s)) == (StepKind.PREFILL, [(2, MIN_CHUNK)])


def test_more_sequences_than_slots_wait_first_in_first_out() -> None:
    s = scheduler(max_sequences=2)
    sequences = [prompt(arrival, 2) for arrival in (1, 2, 3, 4)]
    for sequence in sequences:
        s.add(sequence)
    advance(s)

    assert [sequence.state for sequence in sequences[:3]] == [
        State.DECODE,
        State.DECODE,
        State.WAITING,
    ]
    s.end(sequences[1], State.FINISHED)
    advance(s)
    assert sequences[2].slot == sequences[1].slot
    assert sequences[3].state is State.WAITING


def test_the_latest_sequence_makes_room_and_comes_back_before_newer_ones() -> None:
    s = scheduler(n_pages=6, max_sequences=3)
    first, second, third = (prompt(arrival, 7) for arrival in (1, 2, 3))
    s.add(first)
    s.add(second)
    plans = [advance(s) for _ in range(3)]
    s.add(third)
    while not any(plan.saves for plan in plans):
        plans.append(advance(s))

    (save,) = plans[-1].saves
    assert save.sequence is second
    assert second.state is State.WAITING
    assert s.waiting == [second, third]
    assert len(save.pages) == -(-second.n_computed // PAGE)
    assert s.n_preemptions == 1

    n_tokens, n_computed = len(second.tokens), second.n_computed
    s.end(first, State.FINISHED)
    plan = s.next_step()
    assert [load.sequence for load in plan.loads] == [second]
    assert second.state is State.DECODE
    assert (len(second.tokens), second.n_computed) == (n_tokens, n_computed)  # nothing recomputed


def test_one_sequence_can_fill_the_whole_pool() -> None:
    s = scheduler(n_pages=4)
    sequence = prompt(1, 8)
    s.add(sequence)
    while len(sequence.tokens) < 4 * PAGE:
        advance(s)
    assert step_of(advance(s)).positions.tolist() == [4 * PAGE - 1]


def test_an_evenly_split_pool_holds_every_sequence_at_its_limit() -> None:
    s = scheduler(n_pages=4, max_sequences=2, n_batch=16, n_ctx=2 * PAGE)
    sequences = [prompt(arrival, 2 * PAGE - 1) for arrival in (1, 2)]
    for sequence in sequences:
        s.add(sequence)
    advance(s)
    assert [sequence.state for sequence in sequences] == [State.DECODE, State.DECODE]


def test_a_pool_that_is_too_small_for_one_sequence_is_a_bug() -> None:
    with pytest.raises(EngineBug, match="cannot hold"):
        scheduler(n_pages=4, n_ctx=100)


def test_a_sequence_that_ends_gives_its_pages_back() -> None:
    s = scheduler()
    sequence = prompt(1, 4)
    s.add(sequence)
    s.commit(s.next_step(), 0.0)
    s.end(sequence, State.CANCELLED)

    assert s.next_step().step is None
    assert s.kv.n_available == s.kv.n_pages


def test_a_waiting_sequence_can_be_cancelled() -> None:
    s = scheduler(max_sequences=1)
    s.add(prompt(1, 4))
    waiting = prompt(2, 4)
    s.add(waiting)
    advance(s)
    s.end(waiting, State.CANCELLED)
    assert s.waiting == []
    assert s.kv.n_available == s.kv.n_pages - 2  # those of the one that runs


def test_siblings_wait_for_the_prompt_and_share_it() -> None:
    s = scheduler(n_batch=8)
    leader = prompt(1, 10)
    siblings = [Sequence(n, leader.tokens, leader=leader) for n in (2, 3)]
    late = prompt(4, 2, first=90)
    for sequence in (leader, *siblings, late):
        s.add(sequence)

    assert shape(advance(s)) == (StepKind.PREFILL, [(1, 8)])
    assert late.state is State.PREFILL  # not held up by the siblings
    advance(s)
    assert siblings[0].state is State.WAITING
    advance(s)
    plan = advance(s)
    assert shape(plan) == (StepKind.PREFILL, [(2, 1), (3, 1)])
    assert [sibling.n_cached for sibling in siblings] == [9, 9]
    assert {page for page, _ in step_of(plan).page_copies} <= {leader.pages.pages[2]}


def test_the_latest_leaves_first_even_where_it_began_before_older_ones() -> None:
    s = scheduler(n_pages=8, n_batch=8)
    leader = prompt(1, 10)
    sibling = Sequence(2, leader.tokens, leader=leader)
    late = prompt(3, 2, first=90)
    for sequence in (leader, sibling, late):
        s.add(sequence)
    while sibling.state is State.WAITING:
        advance(s)
    assert late.n_computed > 0

    plan = advance(s)
    while not plan.saves:
        plan = advance(s)
    assert [save.sequence for save in plan.saves] == [late]


def test_page_copies_are_asked_for_once() -> None:
    s = scheduler()
    first = prompt(1, 6)
    s.add(first)
    advance(s)
    second = Sequence(2, [*first.tokens[:6], 55])
    s.add(second)
    copies = [step_of(advance(s)).page_copies for _ in range(4)]
    assert copies == [((first.pages.pages[1], second.pages.pages[1]),), (), (), ()]


def test_only_allowed_moves_are_made() -> None:
    sequence = prompt(1, 2)
    with pytest.raises(EngineBug, match="cannot become FINISHED"):
        sequence.move(State.FINISHED)


def goes_on(_: Sequence) -> bool:
    return False


def work_of(_: Sequence, position: int) -> DeviceWork | None:
    """A work that tells the position."""
    nothing = np.zeros(0)
    return DeviceWork(position, nothing, nothing, nothing)


def decoding(s: Scheduler, n: int, length: int = 3) -> Plan:
    """A decode step of n sequences, in flight."""
    for arrival in range(n):
        s.add(prompt(arrival, length))
    advance(s)
    plan = s.next_step()
    assert shape(plan) == (StepKind.DECODE, [(i, 1) for i in range(n)])
    return plan


def test_a_step_follows_another_before_its_tokens_are_known() -> None:
    s = scheduler(n_batch=16)
    plan = decoding(s, 3)
    last = plan.parts[1].sequence
    ahead = s.following(plan, lambda sequence: sequence is last, work_of)
    assert ahead is not None
    step = step_of(ahead)
    assert step.follows
    assert step.token_ids.tolist() == [-1, -3]
    assert step.positions.tolist() == [4, 4]
    assert [work.k for work in step.sampling or ()] == [5, 5]
    assert step.page_tables.shape == (2, 2)  # the fifth token's page is there

    for _, sequence in s.commit(plan, 0.0):
        sequence.tokens.append(7)
    s.end(last, State.FINISHED)
    assert [row for row, _ in s.commit(ahead, 0.0)] == [0, 1]


def test_a_surplus_token_is_passed_over_and_nothing_knows_of_it() -> None:
    s = scheduler()
    plan = decoding(s, 2)
    first, second = (part.sequence for part in plan.parts)
    ahead = s.following(plan, goes_on, work_of)
    assert ahead is not None
    for _, sequence in s.commit(plan, 0.0):
        sequence.tokens.append(7)
    s.end(first, State.FINISHED)
    assert s.commit(ahead, 0.0) == [(1, second)]
    assert s.kv.lookup(first.tokens)[1] == 4  # the prompt and one token; the last was not computed
    again = s.following(ahead, goes_on, work_of)
    assert again is not None
    assert step_of(again).token_ids.tolist() == [-2]


def test_a_cancelled_sequence_keeps_the_rows_of_the_others() -> None:
    s = scheduler()
    plan = decoding(s, 2)
    _, second = (part.sequence for part in plan.parts)
    ahead = s.following(plan, goes_on, work_of)
    assert ahead is not None
    s.commit(plan, 0.0)
    second.tokens.append(7)  # the first one is cancelled and gets none
    assert [row for row, sequence in s.commit(ahead, 0.0) if sequence is second] == [1]


def test_what_has_to_come_before_a_following_step() -> None:
    s = scheduler(n_pages=4, max_sequences=2)
    plan = decoding(s, 1)
    assert s.following(plan, lambda _: True, work_of) is None  # nobody goes on
    assert s.following(plan, goes_on, lambda *_: None) is None  # nobody can say how
    s.add(prompt(8, 3))
    assert s.following(plan, goes_on, work_of) is None  # there is room for a new sequence
    for _, sequence in s.commit(plan, 0.0):
        sequence.tokens.append(7)
    plan = s.next_step()
    assert step_of(plan).kind is StepKind.PREFILL
    assert s.following(plan, goes_on, work_of) is None  # a prompt is read


def test_those_that_wait_without_room_do_not_hold_others_up() -> None:
    s = scheduler(max_sequences=1)
    plan = decoding(s, 1)
    s.add(prompt(8, 3))
    assert s.following(plan, goes_on, work_of) is None  # not known yet
    for _, sequence in s.commit(plan, 0.0):
        sequence.tokens.append(7)
    plan = s.next_step()
    assert s.following(plan, goes_on, work_of) is not None
    s.end(plan.parts[0].sequence, State.CANCELLED)
    assert s.following(plan, goes_on, work_of) is None


def test_a_following_step_without_a_page_waits_for_the_host() -> None:
    s = scheduler(n_pages=3, max_sequences=2, n_ctx=8)
    plan = decoding(s, 2)  # one page is left, and both need another for the token after this one
    assert s.following(plan, goes_on, work_of) is None
    assert s.n_preemptions == 0
