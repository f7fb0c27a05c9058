"""KV bookkeeping: contents follow pages through sharing, copying, saving; no page is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine.kv_cache import KVCache, PageTable, SavedPages
from runtime.errors import EngineBug

SIZE = 4


def opened(kv: KVCache, tokens: list[int], **options: int) -> PageTable:
    table = kv.open(tokens, n_reserve=len(tokens) + 1, **options)
    assert table is not None
    return table


def used(kv: KVCache, tokens: list[int]) -> PageTable:
    """A sequence of `tokens`, computed to the end."""
    table = opened(kv, tokens)
    kv.copied(table)
    kv.record(table, tokens, len(tokens))
    return table


def test_a_prompt_shares_full_pages_and_copies_a_part_of_a_page_in_use() -> None:
    kv = KVCache(16, SIZE)
    first = used(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])

    second = opened(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 78])

    assert second.pages[:2] == first.pages[:2]
    assert second.n_cached == 9
    assert second.copies == [(first.pages[2], second.pages[2])]
    assert second.pages[2] != first.pages[2]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    kv = KVCache(16, SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    kv.close(used(kv, tokens))

    assert opened(kv, tokens).n_cached == 7


def test_an_unused_part_of_a_page_is_taken_over_without_a_copy() -> None:
    kv = KVCache(16, SIZE)
    first = used(kv, [1, 2, 3, 4, 5, 6])
    pages = list(first.pages)
    kv.close(first)

    second = opened(kv, [1, 2, 3, 4, 5, 6, 7])

    assert (second.pages, second.n_cached, second.copies) == (pages, 6, [])


def test_another_beginning_shares_nothing() -> None:
    kv = KVCache(16, SIZE)
    kv.close(used(kv, [9, 2, 3, 4, 5, 6, 7, 8]))

    # The second page's tokens are the same, but not what stands before them.
    assert opened(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]).n_cached == 0


def test_without_reuse_nothing_is_shared() -> None:
    kv = KVCache(16, SIZE)
    kv.close(used(kv, list(range(8))))
    table = kv.open(list(range(9)), n_reserve=9, reuse=False)
    assert table is not None
    assert table.n_cached == 0


def test_the_oldest_contents_go_first_and_from_their_end() -> None:
    kv = KVCache(6, SIZE)
    old, new = list(range(10, 22)), list(range(30, 42))
    kv.close(used(kv, old))  # three pages, one more reserved
    kv.close(used(kv, new))

    table = opened(kv, [50, 51, 52, 53])  # two pages, so one or two of `old` must go

    assert len(table.pages) == 2
    assert len(kv.lookup(new)[0]) == 3
    pages, n_tokens = kv.lookup(old)
    assert 0 < len(pages) < 3
    assert n_tokens == len(pages) * SIZE


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    kv = KVCache(4, SIZE)
    tokens = list(range(8))
    kv.close(used(kv, tokens))
    before = (kv.n_free, kv.n_idle)

    assert kv.open([*tokens, *range(50, 60)], n_reserve=19) is None

    assert (kv.n_free, kv.n_idle) == before
    assert kv.lookup(tokens)[1] == 8


def test_poisoned_contents_cannot_be_found_again() -> None:
    kv = KVCache(8, SIZE)
    shared = list(range(4))
    kv.close(used(kv, shared))
    table = used(kv, [*shared, 5, 6, 7, 8, 9])
    kv.close(table, poisoned=True)

    assert kv.lookup([*shared, 5, 6, 7, 8, 9])[1] == 4
    assert kv.n_available == 8


def test_without_keeping_every_page_is_free_again() -> None:
    kv = KVCache(8, SIZE, keep=False)
    kv.close(used(kv, list(range(10))))
    assert kv.n_free == 8


def test_a_saved_sequence_shares_what_is_still_here_and_loads_the_rest() -> None:
    kv = KVCache(5, SIZE)
    tokens = list(range(10))
    saved = kv.save(used(kv, tokens), 10)
    other = opened(kv, list(range(50, 58)))  # evicts the end of the saved one
    kv.close(other)

    reopened = kv.reopen(saved, tokens, n_reserve=11)

    assert reopened is not None
    table, missing = reopened
    assert len(table.pages) == 3
    assert 0 not in missing
    assert 2 in missing  # a page that was not full is never shared with its old self
    assert kv.lookup(tokens)[0][:2] == table.pages[:2]  # and others can share it again


def test_giving_a_page_back_twice_is_a_bug() -> None:
    kv = KVCache(4, SIZE)
    table = opened(kv, [1, 2])
    pages = list(table.pages)
    kv.close(table)
    with pytest.raises(EngineBug, match="twice"):
        kv.close(PageTable(pages=pages))


def test_restored_tokens_are_found_and_forgotten_ones_are_not() -> None:
    kv = KVCache(8, SIZE)
    tokens = list(range(10))
    restored = kv.restore(tokens)
    assert restored is not None
    assert restored[1] == [0, 1, 2]
    assert kv.lookup(tokens) == (restored[0], 10)
    assert kv.restore(tokens) == ([], [])
    assert kv.forget(tokens) == 10
    assert kv.lookup(tokens)[1] == 0
    assert kv.n_free == 8


class Run:
    """A sequence of the model: what it was given, and how much of it is computed."""

    def __init__(self, tokens: list[int], table: PageTable) -> None:
        self.tokens = tokens
        self.table = table
        self.n_computed = table.n_cached


class KVCacheMachine(RuleBasedStateMachine):
    """Pages hold what a device would hold; whatever is shared must hold the right tokens."""

    N_PAGES = 12

    @initialize(keep=st.booleans())
    def start(self, keep: bool) -> None:
        self.kv = KVCache(self.N_PAGES, SIZE, keep=keep)
        self.cells: list[list[int | None]] = [[None] * SIZE for _ in range(self.N_PAGES)]
        self.runs: list[Run] = []
        self.saved: list[tuple[list[int], SavedPages, list[list[int | None]]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), reuse=st.booleans())
    def open(self, tokens: list[int], reuse: bool) -> None:
        table = self.kv.open(tokens, n_reserve=len(tokens) + 1, reuse=reuse)
        if table is not None:
            self.arrive(Run(tokens, table))

    def arrive(self, run: Run) -> None:
        for source, target in run.table.copies:
            self.cells[target] = list(self.cells[source])
        self.kv.copied(run.table)
        self.runs.append(run)
        self.check(run)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), n=st.integers(1, 9))
    def compute(self, data: st.DataObject, n: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        for position in range(run.n_computed, min(run.n_computed + n, len(run.tokens))):
            page = run.table.pages[position // SIZE]
            self.cells[page][position % SIZE] = run.tokens[position]
            run.n_computed = position + 1
        self.kv.record(run.table, run.tokens, run.n_computed)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data: st.DataObject, token: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if self.kv.grow(run.table, len(run.tokens) + 1):
            run.tokens = [*run.tokens, token]

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), poisoned=st.booleans())
    def close(self, data: st.DataObject, poisoned: bool) -> None:
        run = data.draw(st.sampled_from(self.runs))
        self.runs.remove(run)
        self.kv.close(run.table, poisoned=poisoned)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        self.runs.remove(run)
        n_pages = self.kv.pages_for(run.n_computed)
        images = [list(self.cells[page]) for page in run.table.pages[:n_pages]]
        self.saved.append((run.tokens, self.kv.save(run.table, run.n_computed), images))

    @precondition(lambda self: self.saved)
    @rule()
    def reopen(self) -> None:
        tokens, saved, images = self.saved[-1]
        reopened = self.kv.reopen(saved, tokens, n_reserve=len(tokens) + 1)
        if reopened is None:
            return
        self.saved.pop()
        table, missing = reopened
        for index in missing:
            self.cells[table.pages[index]] = images[index]
        run = Run(tokens, table)
        run.n_computed = saved.n_tokens
        self.arrive(run)

    def check(self, run: Run) -> None:
        for position in range(run.n_computed):
            page = run.table.pages[position // SIZE]
            assert self.cells[page][position % SIZE] == run.tokens[position]

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for run in getattr(self, "runs", []):
            self.check(run)

    @invariant()
    def no_page_is_lost(self) -> None:
        if not hasattr(self, "kv"):
            return
        in_use = {page for run in self.runs for page in run.table.pages}
        assert len(in_use) + self.kv.n_available == self.N_PAGES

    @invariant()
    def rows_are_the_pages(self) -> None:
        for run in getattr(self, "runs", []):
            assert run.table.row.tolist() == run.table.pages

    def teardown(self) -> None:
        for run in getattr(self, "runs", []):
            self.kv.close(run.table)
        if hasattr(self, "kv"):
            assert self.kv.n_available == self.N_PAGES


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
