"""StepShape: the class of steps that one captured graph serves; which class a step belongs to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.engine.executor import ExecutorLimits
from runtime.engine.step import Step, StepKind

SMALL_BATCHES = (1, 2, 4, 8, 16, 31)
"""Tokens of the classes that the kernels for few tokens serve."""

LARGE_BATCHES = (64, 128, 256, 512, 1024, 2048)
LARGEST_BATCH = LARGE_BATCHES[-1]
LARGEST_DECODE = 128
"""Of generated tokens, whose attention keeps partial results of every one."""

CONTEXTS = (512, 2048, 8192, 32768, 131072, 524288)
"""Positions that a class reaches: what attention's grid and the page tables are made for."""

OUTPUTS = (1, 8, 31, 128)
MAX_OUTPUTS = OUTPUTS[-1]
"""Rows of logits of a class; a step that wants more is performed in parts."""


@dataclass(frozen=True)
class StepShape:
    """Upper bounds of a step, and what its tokens are.

    n_context  positions that its sequences reach
    gathered   the outputs are not simply all tokens in their order
    """

    kind: StepKind
    n_tokens: int
    n_sequences: int
    n_outputs: int
    n_context: int
    gathered: bool

    @property
    def is_small(self) -> bool:
        """Whether the kernels for few tokens serve it."""
        return self.n_tokens <= SMALL_BATCHES[-1]


class StepShapes:
    """The classes of one executor.

    max_batch  tokens of the largest class; longer steps are performed in parts
    """

    def __init__(self, limits: ExecutorLimits, max_batch: int) -> None:
        n = min(limits.max_step_tokens, max_batch)
        # A batch that is no class of its own is rounded up: decoding has a largest class too.
        sizes = [b for b in (*SMALL_BATCHES, *LARGE_BATCHES) if b < n]
        self._batches = [*sizes, n]
        self._max_sequences = limits.max_sequences
        n_positions = limits.n_pages * limits.page_tokens
        self._made: dict[tuple[StepKind, int, int, int, bool], StepShape] = {}
        self._contexts = [*(c for c in CONTEXTS if c < n_positions), n_positions]

    @property
    def max_batch(self) -> int:
        return self._batches[-1]

    def most_tokens(self, kind: StepKind) -> int:
        """Tokens of the largest class of a kind."""
        return self.max_batch if kind is StepKind.PREFILL else min(self.max_batch, LARGEST_DECODE)

    def of(self, step: Step) -> StepShape:
        """The smallest class that holds `step`, whose tokens are at most `most_tokens`."""
        n_tokens, n_outputs = step.n_tokens, len(step.output_tokens)
        plain = n_outputs == n_tokens <= MAX_OUTPUTS and is_plain(step.output_tokens)
        n_context = max(step.positions.tolist()) + 1
        return self._shape(step.kind, n_tokens, n_context, None if plain else n_outputs)

    def biggest(self) -> list[StepShape]:
        """Classes of which one needs the most memory of any."""
        longest = self._contexts[-1]
        return [
            self._shape(kind, self.most_tokens(kind), longest, OUTPUTS[-1]) for kind in StepKind
        ]

    def largest(self) -> list[StepShape]:
        """Classes that together need every kernel, and the most memory, of any."""
        longest = self._contexts[-1]
        return [
            self._shape(kind, n_tokens, longest, n_outputs)
            for kind in StepKind
            for n_tokens in self._batches
            if n_tokens <= self.most_tokens(kind)
            for n_outputs in (None, *OUTPUTS)
            if n_outputs is not None or n_tokens <= MAX_OUTPUTS
        ]

    def first(self, kind: StepKind) -> list[StepShape]:
        """Classes of short contexts and few sequences whose tokens are all outputs."""
        n = min(self._max_sequences, self.max_batch, SMALL_BATCHES[-1])
        batches = {self._batches[bisect_left(self._batches, k)] for k in range(1, n + 1)}
        return [self._shape(kind, batch, 1, None) for batch in sorted(batches)]

    def _shape(
        self, kind: StepKind, n_tokens: int, n_context: int, n_outputs: int | None
    ) -> StepShape:
        """n_outputs None: all tokens in their order."""
        batch = self._batches[bisect_left(self._batches, n_tokens)]
        context = self._contexts[bisect_left(self._contexts, n_context)]
        most = batch if n_outputs is None else OUTPUTS[bisect_left(OUTPUTS, n_outputs)]
        key = (kind, batch, context, most, n_outputs is not None)
        shape = self._made.get(key)
        if shape is None:
            n_sequences = min(batch, self._max_sequences)
            shape = StepShape(kind, batch, n_sequences, min(batch, most), context, key[-1])
            self._made[key] = shape
        return shape


def is_plain(output_tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bool:
    """Whether these are 0, 1, 2, ..."""
    return output_tokens.tolist() == list(range(len(output_tokens)))


def parts_of(step: Step, max_batch: int) -> list[slice]:
    """The spans of tokens in which a step is performed: each fits a class in tokens and outputs."""
    if step.n_tokens <= max_batch and len(step.output_tokens) <= MAX_OUTPUTS:
        return [slice(0, step.n_tokens)]
    spans: list[slice] = []
    outputs = np.sort(step.output_tokens)
    start = 0
    while start < step.n_tokens:
        end = min(start + max_batch, step.n_tokens)
        first = int(np.searchsorted(outputs, start))
        if len(outputs) - first > MAX_OUTPUTS:
            end = min(end, int(outputs[first + MAX_OUTPUTS]))
        spans.append(slice(start, end))
        start = end
    return spans


def part_of(step: Step, span: slice) -> tuple[Step, Sequence[int]]:
    """The step of these tokens alone, and which of the whole step's outputs it has."""
    wanted = step.output_tokens
    rows = np.flatnonzero((wanted >= span.start) & (wanted < span.stop))
    part = Step(
        step.kind,
        step.token_ids[span],
        step.positions[span],
        step.rows[span],
        step.page_tables,
        (wanted[rows] - span.start).astype(np.int32),
    )
    return part, rows.tolist()
