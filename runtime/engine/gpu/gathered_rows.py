"""GatheredRows: what a step's tokens take from tables that are too large for a GPU.

Rows travel as the file has them, a seventh of their values' bytes at 4.5 bits a weight, and become
numbers on the GPU: NumPy would take longer for those of 2048 tokens than a GPU for the whole step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.engine.ngram_rows import NgramRows
from runtime.engine.step import Step
from runtime.models.model import Model


class GatheredRows:
    """The n-gram tables of a model, in the order of their layers."""

    def __init__(self, model: Model) -> None:
        memories = [layer.memory for layer in model.spec.layers if layer.memory is not None]
        self._tables = [NgramRows(memory, model.weights[memory.table]) for memory in memories]

    async def of(self, step: Step) -> list[NDArray[np.uint8]]:
        """u8[n_tokens, bytes] of each table, read on a thread.

        Raises: ValueError where the step does not say what came before its sequences.
        """
        return [await table.blocks(step) for table in self._tables]
