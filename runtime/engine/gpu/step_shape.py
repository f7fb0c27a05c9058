"""StepShape: the class of steps that one captured graph serves; which class a step belongs to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto

import numpy as np

from ops.gpu.sampling import MAX_VOCAB
from runtime.engine.executor import ExecutorLimits
from runtime.engine.ngram_rows import contexts_of
from runtime.engine.step import I32, DeviceWork, Step, StepKind

SMALL_BATCHES = (1, 2, 4, 8, 16, 31)
"""Tokens of the classes that the kernels for few tokens serve."""

LARGE_BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
LARGEST_BATCH = LARGE_BATCHES[-1]
LARGEST_DECODE = 128
"""Of generated tokens, whose attention keeps partial results of every one."""

CONTEXTS = (512, 2048, 8192, 32768, 131072, 524288)
"""Positions that a class reaches: what attention's grid and the page tables are made for."""

EDITS_PER_OUTPUT = 64
"""As many tokens as penalties look back by default."""

SPARE_EDITS = 192

OUTPUTS = (1, 8, 31, 128)
MAX_OUTPUTS = OUTPUTS[-1]
"""Rows of logits of a class; a step that wants more is performed in parts."""


class Sampling(IntEnum):
    """Who chooses the tokens of the outputs."""

    HOST = auto()  # it gets the logits
    BEST = auto()  # the GPU, and each is the one of the largest logit
    CHAIN = auto()  # the GPU, or the host among its candidates


@dataclass(frozen=True)
class StepShape:
    """Upper bounds of a step, and what its tokens are.

    n_context  positions that its sequences reach
    gathered   the outputs are not simply all tokens in their order
    max_edits  logits that samplers may change, of all outputs together
    fetches    experts that are not on the GPU are copied there, layer by layer
    timed      the graph keeps the times at which its parts begin
    """

    kind: StepKind
    n_tokens: int
    n_sequences: int
    n_outputs: int
    n_context: int
    gathered: bool
    sampling: Sampling = Sampling.HOST
    fetches: bool = False
    timed: bool = False

    @property
    def max_edits(self) -> int:
        if self.sampling is not Sampling.CHAIN:
            return 0
        return SPARE_EDITS + EDITS_PER_OUTPUT * self.n_outputs

    @property
    def is_small(self) -> bool:
        """Whether the kernels for few tokens serve it."""
        return self.n_tokens <= SMALL_BATCHES[-1]


class StepShapes:
    """The classes of one executor.

    max_batch     tokens of the largest class; longer steps are performed in parts
    fetch_tokens  from so many tokens on prompts fetch experts; None: they never do
    """

    def __init__(
        self, limits: ExecutorLimits, max_batch: int, *, fetch_tokens: int | None = None
    ) -> None:
        n = min(limits.max_step_tokens, max_batch)
        # A batch that is no class of its own is rounded up: decoding has a largest class too.
        sizes = [b for b in (*SMALL_BATCHES, *LARGE_BATCHES) if b < n]
        self._batches = [*sizes, n]
        self._fetch_tokens = n + 1 if fetch_tokens is None else fetch_tokens
        self._most_unfetched = max(b for b in self._batches if b < max(self._fetch_tokens, 2))
        self._max_sequences = limits.max_sequences
        n_positions = limits.n_pages * limits.page_tokens
        self._made: dict[tuple[bool, int, int, int, bool, Sampling], StepShape] = {}
        self._timed: dict[StepShape, StepShape] = {}
        self._samples = limits.n_vocab <= MAX_VOCAB
        self._contexts = [*(c for c in CONTEXTS if c < n_positions), n_positions]

    @property
    def max_batch(self) -> int:
        return self._batches[-1]

    def most_tokens(self, kind: StepKind, *, fetches: bool = True) -> int:
        """Tokens of the largest class of a kind; not `fetches`: of those that fetch no experts."""
        if kind is not StepKind.PREFILL:
            return min(self.max_batch, LARGEST_DECODE)
        return self.max_batch if fetches else self._most_unfetched

    @property
    def most_missed_tokens(self) -> int:
        """Tokens of the largest class that does not fetch."""
        return max(self.most_tokens(StepKind.DECODE), self._most_unfetched)

    def of(self, step: Step) -> StepShape:
        """The smallest class that holds `step`, whose tokens are at most `most_tokens`."""
        n_tokens, n_outputs = step.n_tokens, len(step.output_tokens)
        sampling = sampling_of(step.sampling)
        plain = sampling is not Sampling.HOST or (
            n_outputs == n_tokens <= MAX_OUTPUTS and is_plain(step.output_tokens)
        )
        n_context = max(step.positions.tolist()) + 1
        return self._shape(step.kind, n_tokens, n_context, None if plain else n_outputs, sampling)

    def samples(self, step: Step) -> bool:
        """Whether there are classes of `step`, or of its parts, that choose the tokens."""
        works, n = step.sampling, step.n_tokens
        if works is None or not self._samples or step.kind is not StepKind.DECODE:
            return False
        most = min(self.most_tokens(step.kind), MAX_OUTPUTS)
        if n != len(works) or (n > most and step.follows) or not is_plain(step.output_tokens):
            return False
        if n <= most:
            return self._has_room(works)
        return all([self._has_room(works[at : at + most]) for at in range(0, n, most)])

    def _has_room(self, works: tuple[DeviceWork, ...]) -> bool:
        """Whether a class chooses this many tokens, with all their edits."""
        n_edits = sum([len(work.edits) for work in works])
        if n_edits <= SPARE_EDITS:
            return True
        chain = self._shape(StepKind.DECODE, len(works), 1, None, Sampling.CHAIN)
        return n_edits <= chain.max_edits

    def timed(self, shape: StepShape) -> StepShape:
        """The class of the same steps whose graph keeps times."""
        return self._timed.setdefault(shape, replace(shape, timed=True))

    def biggest(self) -> list[StepShape]:
        """Classes of which one needs the most memory of any."""
        longest = self._contexts[-1]
        return [
            *(self._shape(k, self.most_tokens(k), longest, OUTPUTS[-1]) for k in StepKind),
            *self._sampling(self.most_tokens(StepKind.DECODE), longest),
        ]

    def largest(self) -> list[StepShape]:
        """Classes that together need every kernel, and the most memory, of any."""
        shortest, longest = self._contexts[0], self._contexts[-1]
        # Attention that chooses keys reads all of a short text, by other kernels, and chooses by
        # kernels of more threads the longer a text may be. Outputs have nothing to do with it.
        shapes = [
            self._shape(kind, n_tokens, n_context, n_outputs)
            for n_context in self._contexts
            for kind in StepKind
            for n_tokens in self._batches
            if n_tokens <= self.most_tokens(kind)
            for n_outputs in ((None, *OUTPUTS) if n_context in (shortest, longest) else OUTPUTS[:1])
            if n_outputs is not None or n_tokens <= MAX_OUTPUTS
        ]
        shapes += self._sampling(self.most_tokens(StepKind.DECODE), longest)
        return list(dict.fromkeys(shapes))  # few tokens have as many outputs at most

    def first_request(self) -> list[StepShape]:
        """Classes of what one sequence of a short context decodes by, but for those whose sampler
        wants all logits where others can have their tokens chosen."""
        shortest = self._contexts[0]
        host = self._shape(StepKind.DECODE, 1, shortest, None)
        return self._sampling(1, shortest) or [host]

    def likely(self) -> list[StepShape]:
        """Classes that one sequence comes to: prompts by their length, then decoding of longer and
        longer texts, and the later chunks of long prompts."""
        kind, longest = StepKind.PREFILL, self._contexts[-1]
        sizes = [n for n in self._batches if n <= min(self.most_tokens(kind), longest)]
        prompts = [self._shape(kind, n, n, 1 if n > 1 else None) for n in sizes]
        decodes = [shape for n in self._contexts for shape in self._sampling(1, n)]
        chunks = [self._shape(kind, sizes[-1], n, 1) for n in self._contexts if n >= sizes[-1]]
        return list(dict.fromkeys([*prompts, *decodes, *chunks]))

    def _sampling(self, n_tokens: int, n_context: int) -> list[StepShape]:
        """The classes that choose the tokens of so many outputs."""
        if not self._samples:
            return []
        kinds = (Sampling.BEST, Sampling.CHAIN)
        return [self._shape(StepKind.DECODE, n_tokens, n_context, None, kind) for kind in kinds]

    def _shape(
        self,
        kind: StepKind,
        n_tokens: int,
        n_context: int,
        n_outputs: int | None,
        sampling: Sampling = Sampling.HOST,
    ) -> StepShape:
        """n_outputs None: all tokens in their order."""
        batch = self._batches[bisect_left(self._batches, n_tokens)]
        context = self._contexts[bisect_left(self._contexts, n_context)]
        most = batch if n_outputs is None else OUTPUTS[bisect_left(OUTPUTS, n_outputs)]
        # Hashing the kind itself takes longer than all the rest.
        is_prefill = kind is StepKind.PREFILL
        key = (is_prefill, batch, context, most, n_outputs is not None, sampling)
        shape = self._made.get(key)
        if shape is None:
            n_sequences = min(batch, self._max_sequences)
            fetches = kind is StepKind.PREFILL and batch >= self._fetch_tokens
            shape = StepShape(
                kind, batch, n_sequences, min(batch, most), context, *key[-2:], fetches
            )
            self._made[key] = shape
        return shape


def is_plain(output_tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bool:
    """Whether these are 0, 1, 2, ..."""
    return output_tokens.tolist() == list(range(len(output_tokens)))


def sampling_of(works: Sequence[DeviceWork] | None) -> Sampling:
    """What chooses the tokens of a step whose outputs need these works."""
    if works is None:
        return Sampling.HOST
    is_plain = all([work.k == 1 and not len(work.edits) for work in works])
    return Sampling.BEST if is_plain else Sampling.CHAIN


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
    """The step of these tokens alone, and which of the whole step's outputs it has.

    Its sequences are those of its tokens: a class has room for no more of them than for tokens.
    """
    wanted = step.output_tokens
    outputs = np.flatnonzero((wanted >= span.start) & (wanted < span.stop))
    sequences, rows = np.unique(step.rows[span], return_inverse=True)
    before, slots, works = _before(step, span), step.state_slots, step.sampling
    part = Step(
        step.kind,
        step.token_ids[span],
        step.positions[span],
        rows.astype(np.int32),
        step.page_tables[sequences],
        (wanted[outputs] - span.start).astype(np.int32),
        state_slots=None if slots is None else slots[sequences],
        previous_tokens=None if before is None else before[sequences],
        sampling=None if works is None else tuple(works[i] for i in outputs),
    )
    return part, outputs.tolist()


def _before(step: Step, span: slice) -> I32 | None:
    """`Step.previous_tokens` of the step of these tokens alone."""
    if step.previous_tokens is None:
        return None
    before = step.previous_tokens.copy()
    first = span.start + np.flatnonzero(np.diff(step.rows[span], prepend=-1))
    contexts = contexts_of(step, before.shape[1] + 1)
    before[step.rows[first]] = contexts[first, 1:]
    return before
