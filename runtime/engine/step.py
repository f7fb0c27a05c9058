"""Step and StepResult: the frozen records that pass between the scheduler and an executor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


class StepKind(Enum):
    """What the tokens of a step are: the arithmetic follows the kind, never the batch size."""

    PREFILL = auto()  # prompt tokens, several per sequence
    DECODE = auto()  # generated tokens, one per sequence


@dataclass(frozen=True)
class Step:
    """One forward pass.

    token_ids     i32[n_tokens]             tokens of one sequence together, positions ascending
    positions     i32[n_tokens]             position of each token in its sequence
    rows          i32[n_tokens]             index of each token's sequence in `page_tables`
    page_tables   i32[n_sequences, n_pages] KV pages of each sequence in order, padded with -1
    output_tokens i32[n_outputs]            tokens (indices into token_ids) whose logits are wanted
    page_copies   ((from, to), ...)         whole KV pages to copy before the step runs
    state_slots   i32[n_sequences]          slot of each sequence's state; None: the model has none
    state_copies  ((from, to), ...)         whole states to copy, in order, before the step runs
    previous_tokens i32[n_sequences, n]     the n = `ExecutorLimits.n_previous` tokens before each
                                            sequence's first one here, the nearest first; -1: there
                                            is none; None: the model does not look at them

    The state of a sequence whose first token here has position 0 starts empty, whatever its slot
    holds; otherwise the slot holds the state after the token before.
    """

    kind: StepKind
    token_ids: I32
    positions: I32
    rows: I32
    page_tables: I32
    output_tokens: I32
    page_copies: tuple[tuple[int, int], ...] = ()
    state_slots: I32 | None = None
    state_copies: tuple[tuple[int, int], ...] = ()
    previous_tokens: I32 | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    logits      f32[n_outputs, n_vocab], valid until the executor's next step
    not_finite  outputs whose logits are not numbers: only of a step with states, which cannot be
                repeated for each sequence alone because the states have moved on
    """

    logits: F32
    not_finite: tuple[int, ...] = ()
