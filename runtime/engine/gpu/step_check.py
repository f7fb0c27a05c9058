"""StepCheck: that a step stays within what an executor has room for, before the GPU sees it."""

from __future__ import annotations

import numpy as np

from runtime.engine.executor import ExecutorLimits
from runtime.engine.gpu.control import cell_pages
from runtime.engine.step import I32, Step
from runtime.errors import EngineBug

FEW = 32
"""Numbers that Python looks through more quickly than NumPy."""


class StepCheck:
    """n_slots: of states; None: the model has none."""

    def __init__(self, limits: ExecutorLimits, n_slots: int | None) -> None:
        self._limits, self._n_slots = limits, n_slots

    def cells(self, step: Step, last: Step | None) -> I32:
        """The page that holds each token, i32[n_tokens]; `last` is the step that began before.

        Raises: EngineBug beyond the limits.
        """
        n_tokens, limits = step.n_tokens, self._limits
        n_sequences, n_pages = step.page_tables.shape
        n_positions = n_pages * limits.page_tokens
        if (
            not 0 < n_tokens <= limits.max_step_tokens
            or n_sequences > limits.max_sequences
            or not self._are_tokens(step, last)
            or not below(step.rows, n_sequences)
            or not below(step.positions, n_positions)
            or not below(step.output_tokens, n_tokens)
        ):
            raise EngineBug(
                f"a step of {n_tokens} tokens and {n_sequences} sequences, up to position "
                f"{step.positions.max(initial=-1)}, is beyond the executor's {limits} or names a "
                "token that does not exist"
            )
        cells = cell_pages(step, limits.page_tokens)
        if not below(cells, limits.n_pages):
            raise EngineBug("a step names a position of a sequence that has no page")
        if not self._names_states(step):
            raise EngineBug(f"state slots {step.state_slots}, copies {step.state_copies}")
        return cells

    def _are_tokens(self, step: Step, last: Step | None) -> bool:
        """Whether the step's tokens exist, or will when the step before has chosen them."""
        if not step.follows:
            return below(step.token_ids, self._limits.n_vocab)
        return (
            last is not None
            and last.sampling is not None
            and below(~step.token_ids, len(last.output_tokens))
        )

    def _names_states(self, step: Step) -> bool:
        """Whether the step has the slots of its sequences' states, if there are states."""
        if self._n_slots is None or step.state_slots is None:
            return self._n_slots is None and step.state_slots is None
        copied = np.array(step.state_copies, np.int32).reshape(-1)
        return below(step.state_slots, self._n_slots) and below(copied, self._n_slots)


def below(values: I32, limit: int) -> bool:
    """Whether all of them are in 0 .. limit - 1."""
    if len(values) > FEW:
        return int(values.view(np.uint32).max()) < limit
    few = values.tolist()  # quicker than NumPy's reductions
    if len(few) == 1:
        return bool(0 <= few[0] < limit)
    return not few or (min(few) >= 0 and max(few) < limit)
