"""Plan: what the scheduler decided to do next, and the arrays of its step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from runtime.engine.sequence import Sequence
from runtime.engine.step import I32, DeviceWork, Step, StepKind, StepResult
from runtime.experts.totals import StepUse


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's share of a step: tokens [start, start + n_tokens) of it.

    wants_logits  the last of them is followed by a new one
    """

    sequence: Sequence
    start: int
    n_tokens: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Copy `pages` of a preempted sequence to host memory (`sequence.images`), one image each."""

    sequence: Sequence
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill `pages` of a returning sequence from `sequence.images` at `indices`."""

    sequence: Sequence
    indices: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next, in this order: all saves, all loads, the step (None: there is none)."""

    saves: tuple[Save, ...]
    loads: tuple[Load, ...]
    parts: tuple[Part, ...]
    step: Step | None

    def uses(
        self, result: StepResult
    ) -> Iterator[tuple[Sequence, tuple[StepUse, ...], slice, int]]:
        """For each sequence and piece of the step: what served the piece's experts, which of its
        tokens are the sequence's, and how many it has."""
        first = 0
        for n_tokens, use in result.uses:
            at = -first
            for part in self.parts if use else ():
                start, end = max(at, 0), min(at + part.n_tokens, n_tokens)
                at += part.n_tokens
                if start < end:
                    yield part.sequence, use, slice(start, end), n_tokens
            first += n_tokens


def step_of(kind: StepKind, parts: list[Part], copies: tuple[tuple[int, int], ...]) -> Step:
    """The arrays of a step."""
    if kind is StepKind.DECODE:
        return decode_step(parts, [p.sequence.tokens[p.start] for p in parts], copies)
    rows = np.arange(len(parts), dtype=np.int32)
    lengths = [part.n_tokens for part in parts]
    ends = np.cumsum(lengths)
    positions = [at for p in parts for at in range(p.start, p.start + p.n_tokens)]
    tokens = [t for p in parts for t in p.sequence.tokens[p.start : p.start + p.n_tokens]]
    return Step(
        kind=kind,
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        rows=np.repeat(rows, lengths),
        page_tables=_page_tables(parts),
        output_tokens=np.array(
            [end - 1 for p, end in zip(parts, ends, strict=True) if p.wants_logits], dtype=np.int32
        ),
        page_copies=copies,
    )


def decode_step(
    parts: list[Part],
    token_ids: list[int],
    copies: tuple[tuple[int, int], ...] = (),
    *,
    sampling: tuple[DeviceWork, ...] | None = None,
    follows: bool = False,
) -> Step:
    """One token of each part, and all logits wanted."""
    rows = np.arange(len(parts), dtype=np.int32)
    return Step(
        kind=StepKind.DECODE,
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array([p.start for p in parts], dtype=np.int32),
        rows=rows,
        page_tables=_page_tables(parts),
        output_tokens=rows,
        page_copies=copies,
        sampling=sampling,
        follows=follows,
    )


def with_states(step: Step, parts: list[Part], running: list[Sequence]) -> Step:
    """`step` with the states of its sequences, and all copies of states that are due."""
    states = {s: s.recurrent for s in running if s.recurrent is not None}
    copies = tuple([copy for state in states.values() for copy in state.copies])
    return replace(step, state_slots=state_slots(parts), state_copies=copies)


def state_slots(parts: list[Part]) -> I32:
    """i32[n_parts]: where the state of each one's sequence is."""
    states = [part.sequence.recurrent for part in parts]
    return np.array([state.slot for state in states if state is not None], dtype=np.int32)


def previous_tokens(parts: list[Part], n: int) -> I32:
    """i32[n_parts, n]: the tokens before each part, the nearest first; -1 where there is none."""
    before = [
        [-1] * n + part.sequence.tokens[max(part.start - n, 0) : part.start] for part in parts
    ]
    return np.array([tokens[: -n - 1 : -1] for tokens in before], dtype=np.int32)


def _page_tables(parts: list[Part]) -> I32:
    """i32[n_parts, n_pages]: one row a part, padded with -1."""
    rows = [part.sequence.pages.row for part in parts]
    if len(rows) == 1:
        return rows[0][None]
    tables = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables
