"""index_keys, index_scores, index_select: blocks that begin before a step, equals, every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ops.gpu.attention_copies import LIST_KEYS
from ops.gpu.heads import turns_of
from ops.gpu.indexer import (
    PAGE_TOKENS,
    SELECT_BLOCKS,
    block_key_reference,
    index_keys,
    index_keys_grid,
    index_scores,
    index_scores_grid,
    index_scores_shared_bytes,
    index_select,
    index_select_block,
    list_keys,
    scores_reference,
    select_reference,
    token_key_reference,
)
from ops.gpu.kernel import Kernel
from ops.quants.block import F32
from tests.support.cases.case import Case, Outcome, given, normal_of
from tests.support.machines import Machine

TOLERANCE = 2e-5
EPS, KEY_EPS = 1e-6, 1e-5
UNTOUCHED = 7.5
SPANS = ((9, 30, 1), (2, 1, 0), (1, 7, 3), (0, 5, 2), (5, 0, 2))
"""(tokens, position of the first, slot) of each sequence."""
N_SLOTS, PAGES_EACH = 4, 2


@dataclass(frozen=True)
class Keys:
    """layer: tokens' keys have a layer norm, and a block's are weighted by gates."""

    dim: int
    block: int
    layer: bool
    n_rot: int

    def __str__(self) -> str:
        return (
            f"{self.dim}, blocks of {self.block}, {'gates' if self.layer else 'mean'}, {self.n_rot}"
        )


KEYS = (Keys(128, 4, False, 64), Keys(16, 4, True, 0), Keys(32, 8, False, 16))


class KeysStep:
    """A step of all spans: what is given, and the pages and states that it changes."""

    def __init__(self, s: Keys) -> None:
        self.s = s
        normal = normal_of(np.random.default_rng(s.dim))
        self.n = n = sum(count for count, _, _ in SPANS)
        self.keys, self.gates = normal(n + 1, s.dim + 4), normal(n + 1, s.dim)
        self.norm, self.bias, self.pool_bias = normal(s.dim), normal(s.dim), normal(s.block, s.dim)
        self.slots = normal(N_SLOTS, (1 + s.layer) * s.block * s.dim + 8)
        tables = np.arange(len(SPANS) * PAGES_EACH, dtype=np.int32)
        self.tables = np.ascontiguousarray(tables.reshape(len(SPANS), -1)[:, ::-1])
        shape = (tables.size, PAGE_TOKENS // s.block, s.dim)
        self.pages = np.full(shape, UNTOUCHED, np.float32)
        self.frequencies = 1e4 ** (-2.0 * np.arange(s.n_rot // 2) / max(1, s.n_rot))
        self.rows = [row for row, (count, _, _) in enumerate(SPANS) for _ in range(count)]
        firsts = np.cumsum([0, *(count for count, _, _ in SPANS[:-1])]).tolist()
        self.spans = [(first, *span) for first, span in zip(firsts, SPANS, strict=True)]

    def arguments(self, m: Machine) -> dict[str, float]:
        """Without the places of pages and states."""
        s, layer = self.s, self.s.layer
        return {
            "counts": given(m, np.array([self.n, 0, len(SPANS), 0], np.uint32)),
            "rows": given(m, np.array([*self.rows, 0], np.int32)),
            "spans": given(m, np.array(self.spans, np.int32)),
            "page_tables": given(m, self.tables),
            "keys": given(m, self.keys),
            "gates": given(m, self.gates, layer),
            "key_norm": given(m, self.norm),
            "key_bias": given(m, self.bias, layer),
            "pool_bias": given(m, self.pool_bias, layer),
            "turns": given(m, turns_of(self.frequencies), s.n_rot > 0),
            "slot_bytes": self.slots.strides[0],
            "table_stride": PAGES_EACH,
            "page_bytes": self.pages.strides[0],
            "keys_stride": self.keys.shape[1],
            "gates_stride": s.dim,
            "dim": s.dim,
            "block": s.block,
            "n_rot": s.n_rot,
            "eps": EPS,
            "key_eps": KEY_EPS,
            "magnitude": 1.0,
            "late": int(layer),
        }

    def kept(self, slots: F32, slot: int) -> F32:
        """Of a slot the keys, and where there are some the gates, of an open block, as a view."""
        n_parts, block, dim = 1 + self.s.layer, self.s.block, self.s.dim
        return slots[slot, : n_parts * block * dim].reshape(n_parts, block, dim)

    def perform(self) -> None:
        """What the kernel does to pages and states."""
        layer, block = self.s.layer, self.s.block
        bias = self.bias if layer else None
        normed = token_key_reference(self.keys[:, : self.s.dim], self.norm, bias, KEY_EPS)
        for row, (first, count, position, slot) in enumerate(self.spans):
            kept = self.kept(self.slots, slot)
            for i in range(count):
                at = position + i
                kept[0, at % block] = normed[first + i]
                if layer:
                    kept[1, at % block] = self.gates[first + i]
                if (at + 1) % block == 0:
                    base = at + 1 - block
                    page = self.pages[self.tables[row, base // PAGE_TOKENS]]
                    page[base % PAGE_TOKENS // block] = block_key_reference(
                        kept[0],
                        kept[1] + self.pool_bias if layer else None,
                        None if layer else self.norm,
                        base * self.frequencies,
                        EPS,
                    )

    def forget_complete(self, slots: F32) -> None:
        """What a complete block has left in a state is of no use: it is not compared."""
        for _, count, position, slot in self.spans:
            used = (position + count) % self.s.block if count else self.s.block
            self.kept(slots, slot)[:, used:] = 0


def run_keys(s: Keys, overlapped: bool, m: Machine) -> Outcome:
    """Pages, and the states of all slots."""
    step = KeysStep(s)
    states, pages = m.place(step.slots), m.place(step.pages)
    arguments = step.arguments(m) | {"states": states, "pages": pages}
    m.launch(index_keys(overlapped=overlapped), index_keys_grid(step.n + 1), arguments)
    step.perform()
    result = [m.read(pages, np.float32, step.pages.shape)]
    result.append(m.read(states, np.float32, step.slots.shape))
    for slots in (result[1], step.slots):
        step.forget_complete(slots)
    return Outcome(
        np.concatenate([part.reshape(-1) for part in result]),
        np.concatenate([step.pages.reshape(-1), step.slots.reshape(-1)]),
        TOLERANCE,
    )


POSITIONS = (70, 40, 19, 95)


@dataclass(frozen=True)
class Scores:
    """n_slices   of the grid; None: those of a step
    alone      every token is the only one of its sequence
    """

    dim: int
    n_head: int
    weighted: bool
    positions: tuple[int, ...] = POSITIONS
    tokens: int = 1
    n_slices: int | None = 2
    alone: bool = True

    def __str__(self) -> str:
        weighted = ", weighted" if self.weighted else ""
        return f"{self.n_head} heads of {self.dim}{weighted}, {self.tokens} tokens a block"


def run_scores(s: Scores, overlapped: bool, m: Machine) -> Outcome:
    """Scores of tokens that have a choice; the others' stay what they are."""
    positions, n_head, dim, weighted = s.positions, s.n_head, s.dim, s.weighted
    rng, block, n_best, n = np.random.default_rng(dim), 4, 8, len(positions)
    n_sequences = n if s.alone else 1
    per_page = PAGE_TOKENS // block
    n_pages = max(positions) // PAGE_TOKENS + 1
    tables = rng.permutation(n_sequences * n_pages).astype(np.int32).reshape(-1, n_pages)
    pages = rng.normal(size=(tables.size, per_page, dim)).astype(np.float32)
    rows = np.arange(n + 1, dtype=np.int32) if s.alone else np.zeros(n + 1, np.int32)
    queries = rng.normal(size=(n + 1, n_head * dim)).astype(np.float32)
    weights = rng.normal(size=(n + 1, n_head)).astype(np.float32)
    scores = np.full((n + 1, n_pages * per_page), UNTOUCHED, np.float32)
    place = m.place(scores)
    grid = index_scores_grid(n + 1, s.tokens)
    m.launch(
        index_scores(overlapped=overlapped),
        grid if s.n_slices is None else (s.n_slices, grid[1]),
        {
            "counts": m.place(np.array([n, 0, n, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*positions, 0], np.int32), writable=False),
            "rows": m.place(rows, writable=False),
            "page_tables": m.place(tables, writable=False),
            "pages": m.place(pages, writable=False),
            "queries": m.place(queries, writable=False),
            "weights": m.place(weights, writable=False) if weighted else 0,
            "scores": place,
            "table_stride": n_pages,
            "page_bytes": pages.strides[0],
            "queries_stride": n_head * dim,
            "weights_stride": n_head,
            "n_head": n_head,
            "dim": dim,
            "block": block,
            "n_best": n_best,
            "max_blocks": scores.shape[1],
            "tokens": s.tokens,
            "scale": 0.25,
            "late": int(s.tokens > 1),
        },
        shared_bytes=index_scores_shared_bytes(n_head, dim, s.tokens),
    )
    for token, position in enumerate(positions):
        n_blocks = (position + 1) // block
        if n_blocks > n_best:
            keys = pages[tables[rows[token]]].reshape(-1, dim)[:n_blocks]
            scores[token, :n_blocks] = scores_reference(
                queries[token].reshape(n_head, dim),
                keys,
                weights[token] if weighted else None,
                0.25,
            )
    return Outcome(m.read(place, np.float32, scores.shape), scores, 5 * TOLERANCE)


SCORES = (
    Scores(128, 35, True),
    Scores(16, 3, False, tokens=2),
    Scores(64, 20, True, tokens=4, alone=False),
    Scores(96, 16, False),
)
LARGE_SCORES = (
    Scores(128, 32, True, (8_191, 2_050), n_slices=None),
    Scores(128, 32, True, (65_535,), n_slices=None),
    Scores(128, 32, True, tuple(range(8_000, 8_064)), tokens=4, n_slices=None, alone=False),
    Scores(128, 4, False, (65_535,), n_slices=None),
)


def run_select(
    block: int,
    n_best: int,
    positions: tuple[int, ...],
    equals: bool,
    masked: bool,
    kernel: Kernel,
    m: Machine,
) -> Outcome:
    """Lists, their ends and masks; equals: scores are a few small numbers."""
    rng, n = np.random.default_rng(block), len(positions)
    n_pages = max(positions) // PAGE_TOKENS + 1
    scores = rng.normal(size=(n + 1, n_pages * PAGE_TOKENS // block)).astype(np.float32)
    scores = np.pad(scores, ((0, 0), (0, 4 + -scores.shape[1] % 4)), constant_values=9)
    if equals:
        scores = np.round(scores)
    scores[0, 1] = np.nan
    tables = rng.permutation((n + 1) * n_pages).astype(np.int32).reshape(n + 1, n_pages)
    rows = np.arange(n, -1, -1, dtype=np.int32)
    masks = np.full((n + 1, n_pages + 1), 0xABCDEF01, np.uint32)
    lists = np.full((n + 1, list_keys(block, n_best) // LIST_KEYS), 0xABCDEF01, np.uint32)
    ends = np.full(n + 1, -7, np.int32)
    arrays = [lists, ends, masks]
    places = [m.place(array) for array in arrays]
    m.launch(
        kernel,
        (n + 1,),
        {
            "counts": m.place(np.array([n, 0, n, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*positions, 0], np.int32), writable=False),
            "rows": m.place(rows, writable=False),
            "page_tables": m.place(tables, writable=False),
            "scores": m.place(scores, writable=False),
            "lists": places[0],
            "ends": places[1],
            "masks": places[2] if masked else 0,
            "table_stride": n_pages,
            "max_blocks": scores.shape[1],
            "list_stride": lists.shape[1],
            "mask_stride": masks.shape[1],
            "block": block,
            "n_best": n_best,
            "late": int(equals),
        },
    )
    for token, position in enumerate(positions):
        keys = select_reference(scores[token], position, block, n_best)
        ends[token] = len(keys) - 1
        firsts = keys[::LIST_KEYS]
        cells = PAGE_TOKENS * tables[rows[token], firsts // PAGE_TOKENS] + firsts % PAGE_TOKENS
        lists[token, : len(firsts)] = cells
        if masked:
            words = np.zeros(position // PAGE_TOKENS + 1, np.uint32)
            np.bitwise_or.at(words, keys // PAGE_TOKENS, np.uint32(1) << (keys % PAGE_TOKENS))
            masks[token, : len(words)] = words
    results = [m.read(at, a.dtype, a.shape) for at, a in zip(places, arrays, strict=True)]
    return Outcome(
        np.concatenate([part.reshape(-1).astype(np.int64) for part in results]),
        np.concatenate([part.reshape(-1).astype(np.int64) for part in arrays]),
    )


SELECTIONS = (
    (5, 4, False, (150, 19, 40, 183)),
    (5, 32, True, (150, 19, 40)),
    (40, 8, False, (1_500, 133)),
    (1_030, 4, False, (4_119,)),
)
"""(best blocks, tokens of a block, equal scores, positions)"""


def cases() -> Iterator[Case]:
    """Small ones alone and overlapped, and long contexts."""
    for overlapped in (False, True):
        keys, scores = (make(overlapped=overlapped) for make in (index_keys, index_scores))
        for s in KEYS:
            yield Case(str(s), keys, partial(run_keys, s, overlapped))
        for setting in SCORES:
            yield Case(str(setting), scores, partial(run_scores, setting, overlapped))
        for threads in SELECT_BLOCKS:
            select = index_select(threads, overlapped=overlapped)
            many = (150, 20 * threads, 40 * threads, 70 * threads + 4)
            for n_best, block, equals, positions in (*SELECTIONS, (5, 4, True, many)):
                chosen = partial(run_select, block, n_best, positions, equals, block == 4, select)
                name = f"{n_best} blocks of {block}{', equals' if equals else ''}"
                yield Case(name, select, chosen)
    long = (40_000, 8_191, 2_050)
    for equals in (True, False):
        select = index_select(index_select_block(max(long) // 4))
        run = partial(run_select, 4, 512, long, equals, not equals, select)
        name = f"512 of 10000 blocks{', equals' if equals else ''}"
        yield Case(name, select, run, large=True)
    for setting in LARGE_SCORES:
        run = partial(run_scores, setting, False)
        name = f"{setting}, {len(setting.positions)} of up to {max(setting.positions) + 1} keys"
        yield Case(name, index_scores(), run, large=True)
