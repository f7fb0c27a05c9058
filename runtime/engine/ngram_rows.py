"""NgramRows: rows of an n-gram table for the tokens of a step, read from the map one by one.

The table is larger than memory, and a row that is not in it is a page fault: the reading happens
on a thread, so that the event loop does not wait for the disk.  Few rows are asked for all at
once before, and taken without a thread where all of them are in memory.
"""

from __future__ import annotations

import asyncio
import mmap

import numpy as np
from numpy.typing import NDArray

from runtime.engine.step import I32, Step
from runtime.models.mapped_file import are_pages_here, expect_scattered_reads, want_pages
from runtime.models.ngram_memory import FEW_TOKENS, I64, NgramMemorySpec
from runtime.models.weights import Weight

FEW_ROWS = 32
"""Of a step, which are looked for in memory first; asking about each takes 2 us."""


class NgramRows:
    """The table `weight` of `memory`."""

    def __init__(self, memory: NgramMemorySpec, weight: Weight) -> None:
        self._memory, self._weight = memory, weight
        if weight.mapped:
            expect_scattered_reads(weight.address, weight.n_bytes)

    async def copy_to(self, out: NDArray[np.float32], step: Step) -> None:
        """out[i] = the rows of token i, one after another; out: f32[n_tokens, n_embd]."""
        await asyncio.to_thread(self._copy, out, step)

    async def blocks(self, step: Step) -> NDArray[np.uint8]:
        """u8[n_tokens, bytes]: the same as the file has them, which is a row of n_embd values."""
        if step.n_tokens * len(self._memory.sizes) > FEW_ROWS:
            return await asyncio.to_thread(self._blocks, step)
        wanted = self._wanted(step)
        if self._are_here(wanted):  # a thread would take longer than the rows
            return self._take(wanted)
        return await asyncio.to_thread(self._take, wanted)

    def _copy(self, out: NDArray[np.float32], step: Step) -> None:
        out[...] = self._weight.format.dequantize_rows(self._blocks(step))

    def _blocks(self, step: Step) -> NDArray[np.uint8]:
        wanted = self._wanted(step)
        self._ask_for_many(wanted)
        return self._take(wanted)

    def _wanted(self, step: Step) -> I64:
        """i64[n_tokens, n_heads]: rows of the table."""
        return self._memory.rows(contexts_of(step, self._memory.n_gram))

    def _take(self, wanted: I64) -> NDArray[np.uint8]:
        rows = self._rows()
        return np.take(rows, wanted, axis=0).reshape(len(wanted), -1)

    def _are_here(self, wanted: I64) -> bool:
        """Whether all rows are in memory; those that are not are on their way."""
        rows = self._rows()
        address, size = rows.ctypes.data, rows.shape[-1]
        places = [address + row * size for row in wanted.ravel().tolist()]
        absent = [place for place in places if not are_pages_here(place, size)]
        for place in absent:
            want_pages(place, size)
        return not absent

    def _ask_for_many(self, wanted: I64) -> None:
        """Have the kernel bring rows together that are not in memory, instead of one by one as they
        are touched.  Some rows tell whether that is worth it: asking about each of a prompt's takes
        longer than copying them."""
        rows = self._rows()
        size = rows.shape[-1]
        places = rows.ctypes.data + wanted.ravel() * size
        if all(are_pages_here(int(at), size) for at in places[:: len(places) // FEW_ROWS + 1]):
            return
        ends = np.concatenate([places, places + (size - 1)])
        for page in np.unique(ends // mmap.PAGESIZE).tolist():
            want_pages(page * mmap.PAGESIZE, 1)

    def _rows(self) -> NDArray[np.uint8]:
        data = self._weight.data
        return data.reshape(-1, data.shape[-1])


def contexts_of(step: Step, n_gram: int) -> I32:
    """i32[n_tokens, n_gram]: each token and those before it, the nearest first; -1: there is none.

    Raises: ValueError where the step does not say what came before its sequences.
    """
    before = step.previous_tokens
    if before is None or before.shape[1] < n_gram - 1:
        raise ValueError(f"a step without the {n_gram - 1} tokens before each sequence's first")
    sequences = step.rows.tolist() if step.n_tokens <= FEW_TOKENS else []
    if sequences and len(set(sequences)) == len(sequences):  # a token of each
        return np.column_stack([step.token_ids, before[sequences, : n_gram - 1]])
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
