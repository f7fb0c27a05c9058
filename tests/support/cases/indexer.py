"""index_keys, index_scores, index_select: blocks that begin before a step, equals, every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ops.gpu.heads import turns_of
from ops.gpu.indexer import (
    PAGE_TOKENS,
    block_key_reference,
    index_keys,
    index_keys_grid,
    index_scores,
    index_select,
    scores_reference,
    select_reference,
    token_key_reference,
)
from ops.quants.block import F32
from tests.support.cases.case import Case, Outcome
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


def run_keys(s: Keys, overlapped: bool, m: Machine) -> Outcome:
    """Pages, and the states of all slots."""
    rng = np.random.default_rng(s.dim)

    def normal(*shape: int) -> F32:
        return rng.normal(size=shape).astype(np.float32)

    n, dim, block = sum(count for count, _, _ in SPANS), s.dim, s.block
    keys, gates = normal(n + 1, dim + 4), normal(n + 1, dim)
    norm, bias, pool_bias = normal(dim), normal(dim), normal(block, dim)
    n_parts = 2 if s.layer else 1
    slots = normal(N_SLOTS, n_parts * block * dim + 8)
    tables = np.arange(len(SPANS) * PAGES_EACH, dtype=np.int32).reshape(len(SPANS), -1)[:, ::-1]
    pages = np.full((tables.size, PAGE_TOKENS // block, dim), UNTOUCHED, np.float32)
    frequencies = 1e4 ** (-2.0 * np.arange(s.n_rot // 2) / max(1, s.n_rot))
    spans, rows = [], []
    for row, (count, position, slot) in enumerate(SPANS):
        spans.append((len(rows), count, position, slot))
        rows += [row] * count
    states, page_place = m.place(slots), m.place(pages)

    def given(array: NDArray[np.generic], there: bool = True) -> int:
        return m.place(np.ascontiguousarray(array), writable=False) if there else 0

    m.launch(
        index_keys(overlapped=overlapped),
        index_keys_grid(n + 1),
        {
            "counts": given(np.array([n, 0, len(SPANS), 0], np.uint32)),
            "rows": given(np.array([*rows, 0], np.int32)),
            "spans": given(np.array(spans, np.int32)),
            "states": states,
            "page_tables": given(tables),
            "pages": page_place,
            "keys": given(keys),
            "gates": given(gates, s.layer),
            "key_norm": given(norm),
            "key_bias": given(bias, s.layer),
            "pool_bias": given(pool_bias, s.layer),
            "turns": given(turns_of(frequencies), s.n_rot > 0),
            "slot_bytes": slots.strides[0],
            "table_stride": PAGES_EACH,
            "page_bytes": pages.strides[0],
            "keys_stride": keys.shape[1],
            "gates_stride": dim,
            "dim": dim,
            "block": block,
            "n_rot": s.n_rot,
            "eps": EPS,
            "key_eps": KEY_EPS,
            "magnitude": 1.0,
        },
    )
    normed = token_key_reference(keys[:, :dim], norm, bias if s.layer else None, KEY_EPS)
    for row, (first, count, position, slot) in enumerate(spans):
        kept = slots[slot, : n_parts * block * dim].reshape(n_parts, block, dim)
        for i in range(count):
            at = position + i
            kept[0, at % block] = normed[first + i]
            if s.layer:
                kept[1, at % block] = gates[first + i]
            if (at + 1) % block == 0:
                base = at + 1 - block
                page = pages[tables[row, base // PAGE_TOKENS]]
                page[base % PAGE_TOKENS // block] = block_key_reference(
                    kept[0],
                    kept[1] + pool_bias if s.layer else None,
                    None if s.layer else norm,
                    base * frequencies,
                    EPS,
                )
    result = [m.read(page_place, np.float32, pages.shape), m.read(states, np.float32, slots.shape)]
    wanted = [pages, slots]
    # What a complete block has left in a state is of no use: it is not compared.
    for part in (result[1], slots):
        for _, count, position, slot in spans:
            used = (position + count) % block
            kept = part[slot, : n_parts * block * dim].reshape(n_parts, block, dim)
            kept[:, used if count else block :] = 0
    return Outcome(
        np.concatenate([part.reshape(-1) for part in result]),
        np.concatenate([part.reshape(-1) for part in wanted]),
        TOLERANCE,
    )


POSITIONS = (70, 40, 19, 95)


def run_scores(
    dim: int, n_head: int, weighted: bool, positions: tuple[int, ...], overlapped: bool, m: Machine
) -> Outcome:
    """Scores of tokens that have a choice; the others' stay what they are."""
    rng, block, n_best, n = np.random.default_rng(dim), 4, 8, len(positions)
    per_page = PAGE_TOKENS // block
    n_pages = max(positions) // PAGE_TOKENS + 1
    tables = rng.permutation(n * n_pages).astype(np.int32).reshape(n, n_pages)
    pages = rng.normal(size=(n * n_pages, per_page, dim)).astype(np.float32)
    queries = rng.normal(size=(n + 1, n_head * dim)).astype(np.float32)
    weights = rng.normal(size=(n + 1, n_head)).astype(np.float32)
    scores = np.full((n + 1, n_pages * per_page), UNTOUCHED, np.float32)
    place = m.place(scores)
    m.launch(
        index_scores(overlapped=overlapped),
        (2, n + 1),
        {
            "counts": m.place(np.array([n, 0, n, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*positions, 0], np.int32), writable=False),
            "rows": m.place(np.arange(n + 1, dtype=np.int32), writable=False),
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
            "scale": 0.25,
        },
    )
    for token, position in enumerate(positions):
        n_blocks = (position + 1) // block
        if n_blocks > n_best:
            keys = pages[tables[token]].reshape(-1, dim)[:n_blocks]
            scores[token, :n_blocks] = scores_reference(
                queries[token].reshape(n_head, dim),
                keys,
                weights[token] if weighted else None,
                0.25,
            )
    return Outcome(m.read(place, np.float32, scores.shape), scores, 5 * TOLERANCE)


def run_select(
    block: int, n_best: int, positions: tuple[int, ...], equals: bool, overlapped: bool, m: Machine
) -> Outcome:
    """The masks; equals: scores are a few small numbers."""
    rng, n = np.random.default_rng(block), len(positions)
    n_pages = max(positions) // PAGE_TOKENS + 1
    scores = rng.normal(size=(n + 1, n_pages * PAGE_TOKENS // block)).astype(np.float32)
    if equals:
        scores = np.round(scores)
    masks = np.full((n + 1, n_pages + 1), 0xABCDEF01, np.uint32)
    place = m.place(masks)
    m.launch(
        index_select(overlapped=overlapped),
        (n + 1,),
        {
            "counts": m.place(np.array([n, 0, n, 0], np.uint32), writable=False),
            "positions": m.place(np.array([*positions, 0], np.int32), writable=False),
            "scores": m.place(scores, writable=False),
            "masks": place,
            "max_blocks": scores.shape[1],
            "mask_stride": masks.shape[1],
            "block": block,
            "n_best": n_best,
        },
    )
    for token, position in enumerate(positions):
        chosen = select_reference(scores[token], position, block, n_best)
        masks[token, : len(chosen)] = chosen
    return Outcome(m.read(place, np.uint32, masks.shape), masks)


def cases() -> Iterator[Case]:
    """Small ones alone and overlapped, and long contexts."""
    for overlapped in (False, True):
        keys, scores, select = (
            make(overlapped=overlapped) for make in (index_keys, index_scores, index_select)
        )
        for s in KEYS:
            yield Case(str(s), keys, partial(run_keys, s, overlapped))
        for dim, n_head, weighted in ((128, 2, True), (16, 3, False)):
            name = f"{n_head} heads of {dim}{', weighted' if weighted else ''}"
            run = partial(run_scores, dim, n_head, weighted, POSITIONS, overlapped)
            yield Case(name, scores, run)
        for block, equals in ((4, False), (4, True), (32, True)):
            positions = (150, 19, 40, 8_300 if block == PAGE_TOKENS else 183)
            chosen = partial(run_select, block, 5, positions, equals, overlapped)
            yield Case(f"5 blocks of {block}{', equals' if equals else ''}", select, chosen)
    long = (40_000, 8_191, 2_050)
    run = partial(run_select, 4, 512, long, True, False)
    yield Case("512 of 10000 blocks", index_select(), run, large=True)
    run = partial(run_scores, 128, 32, True, long[1:], False)
    yield Case("32 heads of 128, 8192 keys", index_scores(), run, large=True)
