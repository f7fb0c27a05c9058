"""GatheredRows: what a step's tokens take from tables that are too large for a GPU."""

from __future__ import annotations

import numpy as np

from runtime.engine.ngram_rows import NgramRows
from runtime.engine.step import F32, Step
from runtime.models.model import Model


class GatheredRows:
    """The n-gram tables of a model, in the order of their layers."""

    def __init__(self, model: Model) -> None:
        memories = [layer.memory for layer in model.spec.layers if layer.memory is not None]
        self._tables = [
            (NgramRows(memory, model.weights[memory.table]), memory.key.n_in) for memory in memories
        ]

    async def of(self, step: Step) -> list[F32]:
        """f32[n_tokens, values] of each table, read on a thread.

        Raises: ValueError where the step does not say what came before its sequences.
        """
        gathered = []
        for table, n_values in self._tables:
            # Of this step alone: a cancelled caller's thread goes on.
            rows = np.empty((step.n_tokens, n_values), np.float32)
            await table.copy_to(rows, step)
            gathered.append(rows)
        return gathered
