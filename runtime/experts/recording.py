"""Recording which experts a run uses: what executors call, and the recorder that makes a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from profiles import Phase, RoutingTrace
from runtime.engine.step import Step, StepKind
from runtime.models.model import Model
from runtime.models.sizes import model_sizes

I32 = NDArray[np.int32]


class RoutingRecorder(Protocol):
    """Sees the routing of every step; an executor's `recorder` is None where nobody looks."""

    def record(self, step: Step, choices: I32) -> None:
        """The step has ended.  choices i32[n_moe_layers, n_tokens, n_used] are its experts, -1:
        none, or not known; they are valid during the call."""
        ...


@runtime_checkable
class RecordedExecutor(Protocol):
    """An executor that can be recorded."""

    recorder: RoutingRecorder | None


class TraceRecorder:
    """Gathers a `RoutingTrace` of everything that an executor does.

    model        what to call the model
    layers       (experts, bytes of one) of each MoE layer
    page_tokens  of the executor's KV pages
    """

    def __init__(self, model: str, layers: Sequence[tuple[int, int]], page_tokens: int) -> None:
        self._model, self._layers, self._page_tokens = model, tuple(layers), page_tokens
        self._choices: list[I32] = []
        self._sequences: list[I32] = []
        self._phases: list[int] = []
        self._n_sequences = 0
        self._ends: dict[tuple[int, int], int] = {}

    @property
    def n_tokens(self) -> int:
        return sum(len(choices) for choices in self._choices)

    def record(self, step: Step, choices: I32) -> None:
        """See `RoutingRecorder.record`."""
        self._choices.append(np.ascontiguousarray(choices.transpose(1, 0, 2)))
        self._phases.append(Phase.GENERATED if step.kind is StepKind.DECODE else Phase.PROMPT)
        numbers = np.empty(step.n_tokens, np.int32)
        for row in range(len(step.page_tables)):
            tokens = np.flatnonzero(step.rows == row)
            if len(tokens):
                numbers[tokens] = self._sequence(step, row, tokens)
        self._sequences.append(numbers)

    def trace(self) -> RoutingTrace:
        """What was recorded so far.  Raises: ProfileError where that is nothing that a trace can
        hold, as for a model without experts."""
        n_used = max((choices.shape[2] for choices in self._choices), default=0)
        empty = np.zeros((0, len(self._layers), n_used), np.int32)
        return RoutingTrace(
            self._model,
            tuple(n_expert for n_expert, _ in self._layers),
            tuple(n_bytes for _, n_bytes in self._layers),
            np.concatenate([empty, *self._choices]),
            np.array([len(choices) for choices in self._choices], np.int32),
            np.array(self._phases, np.uint8),
            np.concatenate([np.zeros(0, np.int32), *self._sequences]),
        )

    def _sequence(self, step: Step, row: int, tokens: NDArray[np.intp]) -> int:
        """The number of the sequence: that of the one whose last token lies before these.

        A step does not name its sequences, but no two of them write the same cell of KV.
        """
        first, last = int(step.positions[tokens[0]]), int(step.positions[tokens[-1]])
        number = self._ends.pop(self._cell(step, row, first - 1), None) if first else None
        if number is None:
            number, self._n_sequences = self._n_sequences, self._n_sequences + 1
        self._ends[self._cell(step, row, last)] = number
        return number

    def _cell(self, step: Step, row: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._page_tokens)
        return int(step.page_tables[row, page]), offset


def recorder_for(model: Model, name: str, page_tokens: int) -> TraceRecorder:
    """A recorder of a model's routing."""
    sizes = model_sizes(model.spec, model.file.tensors)
    layers = [(layer.n_expert, layer.expert_bytes) for layer in sizes.layers if layer.n_expert]
    return TraceRecorder(name, layers, page_tokens)
