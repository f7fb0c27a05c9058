"""GatheredRows: what a step's tokens take from tables that are too large for a GPU.

Rows travel as the file has them, a seventh of their values' bytes at 4.5 bits a weight, and become
numbers on the GPU: NumPy would take longer for those of 2048 tokens than a GPU for the whole step.
Those of steps whose tokens the GPU chooses are gathered by CPU workers (`table_rows.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.engine.gpu.control import ControlWriter
from runtime.engine.ngram_rows import NgramRows, contexts_of
from runtime.engine.step import I32, Step
from runtime.models.model import Model

if TYPE_CHECKING:
    from runtime.engine.gpu.table_rows import TableRows

Gathered = list[NDArray[np.uint8]] | I32


class GatheredRows:
    """The n-gram tables of a model, in the order of their layers."""

    def __init__(self, model: Model, rows: TableRows) -> None:
        weights = model.weights
        self._tables = [NgramRows(memory, weights[memory.table]) for memory in model.spec.memories]
        self._rows, self._n_gram = rows, model.spec.n_previous + 1

    async def of(self, step: Step) -> Gathered:
        """u8[n_tokens, bytes] of each table, read on a thread; of a step that chooses its tokens
        their contexts, see `contexts_of`.

        Raises: ValueError where the step does not say what came before its sequences.
        """
        if step.sampling is not None:
            return contexts_of(step, self._n_gram)
        return [await table.blocks(step) for table in self._tables]

    def give(self, gathered: Gathered, epoch: int, writer: ControlWriter) -> None:
        """Leave the rows of step `epoch` in its control block, or have workers gather them.

        Raises: EngineBug while a worker is still at an earlier step.
        """
        if isinstance(gathered, list):
            writer.write_memories(gathered)
        else:
            self._rows.begin(epoch, gathered)

    def ended(self, epoch: int) -> bool:
        """Whether the workers have done with step `epoch`."""
        return self._rows.ended(epoch)

    def check(self, epoch: int, *, behind: bool = False) -> None:
        """Raises: ExchangeStalled where the rows of the step did not come."""
        self._rows.check(epoch, behind=behind)
