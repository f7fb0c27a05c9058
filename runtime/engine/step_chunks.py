"""StepChunks: the numbers of chunks of those jobs where they follow from the step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ops.cpu.program import Program
from runtime.engine.activation_rows import ActivationRows

JobChunks = list[tuple[int, int]]
"""(job, chunks that it has for each unit)"""


@dataclass
class StepRows:
    """The rows that a job works on: all tokens of the step, or its outputs."""

    n_rows: NDArray[np.int64]  # i64[1], read when the jobs run
    per_row: list[int] = field(default_factory=list)  # jobs of a chunk a row
    slices: JobChunks = field(default_factory=list)  # jobs with several chunks for each row
    if_any: JobChunks = field(default_factory=list)  # jobs that are skipped without rows
    own: list[ActivationRows] = field(default_factory=list)  # that jobs on other rows do not use


class StepChunks:
    """Fill the lists while building a program, `freeze`, then `apply` before every step.

    tokens, outputs     jobs on the rows of all tokens, and of the outputs alone
    per_item            jobs with chunks for each attention item
    per_output_item     the same for the items that outputs depend on
    per_partial         jobs of a chunk a token where results of items are merged
    per_sequence        jobs with chunks for each sequence
    """

    def __init__(self, n_tokens: NDArray[np.int64], n_outputs: NDArray[np.int64]) -> None:
        self.tokens, self.outputs = StepRows(n_tokens), StepRows(n_outputs)
        self.per_item: JobChunks = []
        self.per_output_item: JobChunks = []
        self.per_partial: list[int] = []
        self.per_sequence: JobChunks = []

    def freeze(self, program: Program) -> None:
        """Take the finished program."""
        self._n_chunks = program.n_chunks
        self._applied = (-1, -1, -1, -1, -1, -1)
        self._frozen = [
            _arrays(jobs)
            for jobs in (
                [(job, 1) for job in self.tokens.per_row] + self.tokens.slices,
                [(job, 1) for job in self.outputs.per_row] + self.outputs.slices,
                self.tokens.if_any,
                self.outputs.if_any,
                self.per_item,
                self.per_output_item,
                [(job, 1) for job in self.per_partial],
                self.per_sequence,
            )
        ]

    def apply(
        self,
        n_tokens: int,
        n_outputs: int,
        n_sequences: int,
        n_items: int,
        n_output_items: int,
        merged: int,
    ) -> None:
        """Set the chunks of a step; see `StepBuffers.fill`."""
        wanted = (n_tokens, n_outputs, n_sequences, n_items, n_output_items, merged)
        if wanted == self._applied:
            return  # while sequences decode, steps are alike
        units = (
            n_tokens, n_outputs, 1, int(n_outputs > 0), n_items, n_output_items, n_tokens * merged,
            n_sequences,
        )  # fmt: skip
        for (jobs, chunks), n in zip(self._frozen, units, strict=True):
            self._n_chunks[jobs] = chunks * n
        self._applied = wanted


def _arrays(jobs: JobChunks) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    return np.array([j for j, _ in jobs], np.intp), np.array([n for _, n in jobs], np.int64)
