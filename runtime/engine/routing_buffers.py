"""RoutingBuffers: where a program's routers leave the experts that they chose, layer by layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.cpu.program import aligned
from runtime.engine.step import I32, Step
from runtime.engine.step_chunks import StepRows


class RoutingBuffers:
    """A buffer for each MoE layer, in order; `choices` is what one wants to know after a step."""

    def __init__(self) -> None:
        self._layers: list[tuple[I32, StepRows]] = []

    def add(self, n_tokens: int, n_used: int, rows: StepRows) -> NDArray[np.int32]:
        """The buffer of the next layer, i32[n_tokens, n_used]; its router has a row for `rows`."""
        buffer = aligned((n_tokens, n_used), np.int32)
        self._layers.append((buffer, rows))
        return buffer

    def choices(self, step: Step, outputs: StepRows) -> I32:
        """The experts that the step which has just ended used, i32[n_moe_layers, n_tokens, n_used].

        -1 where a layer uses fewer, and for tokens that the last layer did not compute because
        they are no outputs.
        """
        n_used = max((buffer.shape[1] for buffer, _ in self._layers), default=0)
        found = np.full((len(self._layers), step.n_tokens, n_used), -1, np.int32)
        for layer, (buffer, rows) in enumerate(self._layers):
            tokens = step.output_tokens if rows is outputs else slice(None)
            n_rows = len(step.output_tokens) if rows is outputs else step.n_tokens
            found[layer, tokens, : buffer.shape[1]] = buffer[:n_rows]
        return found
