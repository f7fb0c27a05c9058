"""KVCache: which page of attention keys and values holds what.  Bookkeeping only, no data.

A page holds `page_tokens` tokens of one sequence.  Computed pages are known by their content (the
chain of all tokens up to them), so any prompt that starts alike shares them, whoever made them; a
page that is shared only in part is copied.  Pages nobody uses stay until their room is needed; the
least recently used go first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.engine.step import I32
from runtime.errors import EngineBug

ROOT = b""  # the chain before the first page


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in order.

    pages     page ids; chain: digest of all tokens up to the end of each full page
    n_cached  tokens that came from shared or copied pages
    copies    (from, to) pages to copy before the next step; the sources stay pinned until `copied`
    """

    pages: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    n_cached: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    _row: I32 = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def row(self) -> I32:
        """The pages as i32[n]; made anew only when there are more: pages are never exchanged."""
        if len(self._row) != len(self.pages):
            self._row = np.array(self.pages, np.int32)
        return self._row


@dataclass(frozen=True, slots=True)
class SavedPages:
    """What a sequence that left its pages needs to come back; they held n_tokens tokens."""

    n_tokens: int
    n_pages: int
    chain: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class _Content:
    """What a registered page holds: the chain before it, and its tokens (a page or fewer)."""

    parent: bytes
    tokens: list[int]
    digest: bytes | None  # of the chain with this page; None while it is not full


class KVCache:
    """Pages, reference counts and contents.  Every method is quick and synchronous."""

    def __init__(self, n_pages: int, page_tokens: int, *, keep: bool = True) -> None:
        """keep: whether contents outlive their sequences."""
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self._keep = keep
        self._refs = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered, unused; oldest first
        self._contents: dict[int, _Content] = {}
        self._full: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}

    @property
    def n_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def n_idle(self) -> int:
        """Pages that hold contents of sequences that have ended."""
        return len(self._idle)

    @property
    def n_available(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def chain_of(self, tokens: Sequence[int]) -> list[bytes]:
        """The digests by which the full pages of `tokens` are found."""
        size = 4 * self.page_tokens
        content = np.asarray(tokens, dtype=np.int32).tobytes()
        chain: list[bytes] = []
        for start in range(0, len(content) - size + 1, size):
            chain.append(_digest(_end(chain), content[start : start + size]))
        return chain

    def open(
        self,
        tokens: Sequence[int],
        *,
        n_reserve: int,
        chain: Sequence[bytes] | None = None,
        spare: int = 0,
        reuse: bool = True,
        limit: int | None = None,
    ) -> PageTable | None:
        """A table with room for `n_reserve` tokens that shares what is known of `tokens`.

        chain: `chain_of(tokens)`, for a caller that asks more than once; limit: tokens to share.
        At least the last token stays to be computed, because its logits are wanted.
        None where fewer than `spare` pages would be left.
        """
        table = PageTable()
        limit = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        if reuse:
            chain = self.chain_of(tokens) if chain is None else chain
            self._share_full(table, chain[: limit // self.page_tokens])
        n_new = self.pages_for(n_reserve) - len(table.pages)
        if self.n_available < n_new + spare:
            self._drop(table)
            return None
        if reuse and n_new:
            self._share_part(table, tokens, limit, n_new + spare)
        if not self.grow(table, n_reserve):
            raise EngineBug("pages that were counted as available are not")
        return table

    def reopen(
        self, saved: SavedPages, tokens: Sequence[int], *, n_reserve: int, spare: int = 0
    ) -> tuple[PageTable, list[int]] | None:
        """A table for a saved sequence, and the indices of its pages whose images must be loaded.

        Pages whose contents are still here are shared again.  None where pages are missing.
        """
        table = PageTable(chain=list(saved.chain))
        known = [self._full.get(digest) for digest in saved.chain]
        known += [None] * (saved.n_pages - len(known))
        for page in known:
            if page is not None:
                self._take(page)
        missing = [index for index, page in enumerate(known) if page is None]
        n_new = len(missing) + max(self.pages_for(n_reserve) - saved.n_pages, 0)
        if self.n_available < n_new + spare:
            self._drop(PageTable(pages=[page for page in known if page is not None]))
            return None
        table.pages = [self._new_page() if page is None else page for page in known]
        for index in missing:
            if index < len(table.chain):
                self._register(table.pages[index], self._full_content(table.chain, tokens, index))
        self.grow(table, n_reserve)
        return table, missing

    def grow(self, table: PageTable, n_tokens: int) -> bool:
        """Give `table` room for `n_tokens`; False, and nothing changed, where pages are missing."""
        n_new = self.pages_for(n_tokens) - len(table.pages)
        if n_new <= 0:
            return True
        if n_new > self.n_available:
            return False
        table.pages.extend(self._new_page() for _ in range(n_new))
        return True

    def record(self, table: PageTable, tokens: Sequence[int], n_computed: int) -> None:
        """The first `n_computed` of `tokens` are in the pages of `table`: make them findable."""
        size = self.page_tokens
        while (len(table.chain) + 1) * size <= n_computed:
            index = len(table.chain)
            content = np.asarray(tokens[index * size : (index + 1) * size], dtype=np.int32)
            table.chain.append(_digest(_end(table.chain), content.tobytes()))
            self._register(table.pages[index], self._full_content(table.chain, tokens, index))
        start = len(table.chain) * size
        if n_computed > start:
            self._record_part(table, tokens[start:n_computed])

    def copied(self, table: PageTable) -> None:
        """The copies of `table` are done: their sources may go."""
        for source, _ in table.copies:
            self._release(source)
        table.copies.clear()

    def save(self, table: PageTable, n_tokens: int) -> SavedPages:
        """Take `table` apart; the caller copies the pages of `n_tokens` before they are reused."""
        self.copied(table)
        saved = SavedPages(n_tokens, self.pages_for(n_tokens), tuple(table.chain))
        self._drop(table)
        return saved

    def close(self, table: PageTable, *, poisoned: bool = False) -> None:
        """Take `table` apart.  poisoned: what it computed must not be found again."""
        self.copied(table)
        if poisoned:
            for page in table.pages[table.n_cached // self.page_tokens :]:
                self._unregister(page)
        self._drop(table)

    def lookup(
        self, tokens: Sequence[int], chain: Sequence[bytes] | None = None
    ) -> tuple[list[int], int]:
        """The pages that hold the beginning of `tokens`, and how many tokens that is."""
        table = PageTable()
        self._share_full(table, self.chain_of(tokens) if chain is None else chain)
        pages, n_tokens = list(table.pages), table.n_cached
        page, n_common = self._best_part(table, tokens, len(tokens))
        self._drop(table)
        return (pages, n_tokens) if page is None else ([*pages, page], n_tokens + n_common)

    def forget(self, tokens: Sequence[int]) -> int:
        """Make the cached beginning of `tokens` unfindable; returns how many tokens that was."""
        pages, n_tokens = self.lookup(tokens)
        for page in pages:
            self._unregister(page)
            if not self._refs[page]:
                del self._idle[page]
                self._free.append(page)
        return n_tokens

    def restore(self, tokens: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Idle pages that will hold `tokens`, and which of their saved images (by index) to load
        into them.

        What is here already is left alone.  None where pages are missing.
        """
        if self.lookup(tokens)[1] == len(tokens):
            return [], []
        table = PageTable()
        self._share_full(table, self.chain_of(tokens))
        n_known = len(table.pages)
        if not self.grow(table, len(tokens)):
            self._drop(table)
            return None
        self.record(table, tokens, len(tokens))
        pages = table.pages[n_known:]
        self._drop(table)
        return pages, list(range(n_known, n_known + len(pages)))

    def _share_full(self, table: PageTable, chain: Sequence[bytes]) -> None:
        for digest in chain:
            page = self._full.get(digest)
            if page is None:
                break
            self._take(page)
            table.pages.append(page)
            table.chain.append(digest)
        table.n_cached = len(table.pages) * self.page_tokens

    def _share_part(
        self, table: PageTable, tokens: Sequence[int], limit: int, n_needed: int
    ) -> None:
        """Go on with the page that shares most of the next tokens: a copy, or itself if unused."""
        best, n_best = self._best_part(table, tokens, limit)
        if best is None:
            return
        if not self._refs[best] and n_best == len(self._contents[best].tokens):
            self._take(best)
            self._unregister(best)
            table.pages.append(best)
        elif self._refs[best] or self.n_available > n_needed:
            self._take(best)  # pinned first, or the new page could be this one
            copy = self._new_page()
            table.pages.append(copy)
            table.copies.append((best, copy))
        else:
            return
        table.n_cached += n_best

    def _best_part(
        self, table: PageTable, tokens: Sequence[int], limit: int
    ) -> tuple[int | None, int]:
        """The page that shares most of what follows the pages of `table`, and how many tokens."""
        wanted = list(tokens[table.n_cached : min(table.n_cached + self.page_tokens, limit)])
        best, n_best, longer = None, 0, wanted[:1]
        for page in self._children.get(_end(table.chain), ()):
            if n_best == len(wanted):
                break
            # Thousands of conversations may begin alike: most are dismissed by one comparison.
            content = self._contents[page].tokens
            if content[: n_best + 1] == longer:
                best, n_best = page, _common(content, wanted)
                longer = wanted[: n_best + 1]
        return best, n_best

    def _record_part(self, table: PageTable, tokens: Sequence[int]) -> None:
        """The last page of `table` is not full: it holds `tokens`, more than before."""
        page = table.pages[len(table.chain)]
        known = self._contents.get(page)
        if known is None:
            self._register(page, _Content(_end(table.chain), list(tokens), None))
        else:
            # The page is this sequence's own, and what it held stays.
            known.tokens.extend(tokens[len(known.tokens) :])

    def _full_content(self, chain: Sequence[bytes], tokens: Sequence[int], index: int) -> _Content:
        start = index * self.page_tokens
        content = list(tokens[start : start + self.page_tokens])
        return _Content(_end(chain[:index]), content, chain[index])

    def _register(self, page: int, content: _Content) -> None:
        self._unregister(page)
        if content.digest is not None:
            if content.digest in self._full:
                return  # another page already holds the same
            self._full[content.digest] = page
        self._contents[page] = content
        self._children.setdefault(content.parent, {})[page] = None

    def _unregister(self, page: int) -> None:
        content = self._contents.pop(page, None)
        if content is None:
            return
        if content.digest is not None:
            del self._full[content.digest]
        siblings = self._children[content.parent]
        del siblings[page]
        if not siblings:
            del self._children[content.parent]

    def _new_page(self) -> int:
        if not self._free:
            oldest, _ = self._idle.popitem(last=False)
            self._unregister(oldest)
            self._free.append(oldest)
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _take(self, page: int) -> None:
        self._refs[page] += 1
        self._idle.pop(page, None)

    def _release(self, page: int) -> None:
        if self._refs[page] < 1:
            raise EngineBug(f"page {page} was given back twice")
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if page in self._contents and self._keep:
            self._idle[page] = None
        else:
            self._unregister(page)
            self._free.append(page)

    def _drop(self, table: PageTable) -> None:
        # The end goes first, so that it is also evicted first: a page without its beginning is of
        # no use.
        for page in reversed(table.pages):
            self._release(page)
        table.pages.clear()


def _end(chain: Sequence[bytes]) -> bytes:
    return chain[-1] if chain else ROOT


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, digest_size=16).digest()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n
