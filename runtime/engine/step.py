"""Step and StepResult: the frozen records that pass between the scheduler and an executor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.experts.totals import StepUse

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


class StepKind(Enum):
    """What the tokens of a step are: the arithmetic follows the kind, never the batch size."""

    PREFILL = auto()  # prompt tokens, several per sequence
    DECODE = auto()  # generated tokens, one per sequence


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """How an executor chooses the token of one output: see `ops.gpu.sampling`.

    k          candidates
    edits      `EDIT`[n]
    penalties  `PENALTIES`, one
    chain      `CHAIN`, one; None: the draw among the candidates is the host's
    """

    k: int
    edits: NDArray[Any]
    penalties: NDArray[Any]
    chain: NDArray[Any] | None


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
    sampling      (work of each output, ..) the executor chooses the tokens (`SamplingExecutor`);
                                            None: it gives the logits
    follows       it begins before the tokens of the step before are known: the token id -1 - i
                  stands for the one that is chosen for output i of that step

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
    sampling: tuple[DeviceWork, ...] | None = None
    follows: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an executor chose for each output of a step with `sampling`.

    tokens       the best candidate, or what the work's chain drew
    ids, values  i32, f32[n_outputs, MAX_K]: candidates and their edited logits, k of each output,
                 the largest first; None where the work of all outputs was only to find the best
    """

    tokens: list[int]
    ids: I32 | None = None
    values: F32 | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step gave; its arrays are valid until the executor's next step but one begins.

    logits      f32[n_outputs, n_vocab], valid until the executor's next step; of a step with
                `sampling` f32[n_outputs, 0]
    not_finite  outputs whose logits are not numbers: only of a step that cannot be repeated for
                each sequence alone, because states have moved on, or the next step has begun
    chosen      of a step with `sampling`
    uses        of routed experts: for each piece in which the step was performed how many tokens
                it had and what served them; none where the GPU holds all of them
    """

    logits: F32
    not_finite: tuple[int, ...] = ()
    chosen: Chosen | None = None
    uses: tuple[tuple[int, tuple[StepUse, ...]], ...] = ()
