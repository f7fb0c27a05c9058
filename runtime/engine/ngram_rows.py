"""NgramRows: rows of an n-gram table for the tokens of a step, read from the map one by one.

The table is larger than memory, and a row that is not in it is a page fault: the reading happens
on a thread, so that the event loop does not wait for the disk.
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from runtime.engine.step import I32, Step
from runtime.models.ngram_memory import NgramMemorySpec
from runtime.models.weights import Weight


class NgramRows:
    """The table `weight` of `memory`."""

    def __init__(self, memory: NgramMemorySpec, weight: Weight) -> None:
        self._memory, self._weight = memory, weight

    async def copy_to(self, out: NDArray[np.float32], step: Step) -> None:
        """out[i] = the rows of token i, one after another; out: f32[n_tokens, n_embd]."""
        await asyncio.to_thread(self._copy, out, step)

    def _copy(self, out: NDArray[np.float32], step: Step) -> None:
        wanted = self._memory.rows(contexts_of(step, self._memory.n_gram)).reshape(-1)
        values = self._weight.format.dequantize_rows(self._weight.data[wanted])
        out[...] = values.reshape(out.shape)


def contexts_of(step: Step, n_gram: int) -> I32:
    """i32[n_tokens, n_gram]: each token and those before it, the nearest first; -1: there is none.

    Raises: ValueError where the step does not say what came before its sequences.
    """
    before = step.previous_tokens
    if before is None or before.shape[1] < n_gram - 1:
        raise ValueError(f"a step without the {n_gram - 1} tokens before each sequence's first")
    index = np.arange(step.n_tokens)
    place = index - np.searchsorted(step.rows, step.rows)  # in the sequence's part of the step
    contexts = np.empty((step.n_tokens, n_gram), np.int32)
    contexts[:, 0] = step.token_ids
    for j in range(1, n_gram):
        inside = place >= j
        earlier = np.clip(j - 1 - place, 0, n_gram - 2)
        contexts[:, j] = np.where(
            inside, step.token_ids[np.maximum(index - j, 0)], before[step.rows, earlier]
        )
    return contexts
