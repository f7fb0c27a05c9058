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
    """

    kind: StepKind
    token_ids: I32
    positions: I32
    rows: I32
    page_tables: I32
    output_tokens: I32
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepResult:
    """What a step gave.  logits: f32[n_outputs, n_vocab], valid until the executor's next step."""

    logits: F32
