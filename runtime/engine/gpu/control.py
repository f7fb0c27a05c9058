"""The control block: everything a step takes from the host, in one piece of pinned memory.

`ops.gpu.step_io` says how the GPU reads it.  The ring has a block for each step that may still be
read while the next one is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ops.gpu.sampling import CHAIN, EDIT, PENALTIES
from ops.gpu.step_io import DELTA_BYTES, DELTAS_HEADER_BYTES, RING
from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer
from runtime.engine.gpu.step_shape import Sampling, StepShape
from runtime.engine.step import I32, DeviceWork, Step
from runtime.errors import EngineBug

U8 = NDArray[np.uint8]
Deltas = NDArray[np.uint64]
"""u64[n, 4]: rows of the model's table of experts, and their new addresses of gate, up, down."""

NO_DELTAS: Deltas = np.zeros((0, 4), np.uint64)

ANY_CHAIN = (1.0, -np.inf, 0, 0, 0, 1.0, 0, 0)
"""Of an output whose candidates the host chooses from."""


@dataclass(frozen=True)
class ControlLayout:
    """Where the parts of a block lie, in bytes; 16-byte aligned.

    The GPU copies the first `n_bytes`; the changes to the table of experts follow.
    """

    counts: int
    token_ids: int
    positions: int
    rows: int
    cell_pages: int
    output_tokens: int
    page_tables: int
    spans: int
    memories: int
    k: int
    first_edit: int
    penalties: int
    chains: int
    edits: int
    n_bytes: int
    n_tokens: int
    max_pages: int
    max_deltas: int

    @property
    def block_bytes(self) -> int:
        return self.n_bytes + DELTAS_HEADER_BYTES + self.max_deltas * DELTA_BYTES


def control_layout(
    shape: StepShape,
    page_tokens: int,
    max_deltas: int,
    *,
    has_states: bool = False,
    memory_bytes: int = 0,
) -> ControlLayout:
    """The layout of steps of this shape.

    u32 counts[4]: tokens, outputs, sequences, whether the step was launched before the one before
    it had ended; then i32 token_ids, positions, rows, cell_pages,
    each [n_tokens], output_tokens[n_outputs], page_tables[n_sequences, max_pages]; of models with
    states spans[n_sequences, 4], see `spans_of`; of models with memories the blocks of each token's
    rows, as `MemoryLaunches` takes them, `memory_bytes` of a token together; where chains choose
    tokens, as `ops.gpu.sampling` takes them, k, first_edit, penalties, chains, edits.
    """
    max_pages = -(-shape.n_context // page_tokens)
    n, n_outputs = shape.n_tokens, shape.n_outputs
    sizes = [16, 4 * n, 4 * n, 4 * n, 4 * n, 4 * n_outputs, 4 * shape.n_sequences * max_pages]
    sizes.append(16 * shape.n_sequences if has_states else 0)
    sizes.append(memory_bytes * n)
    sampled = n_outputs if shape.sampling is Sampling.CHAIN else 0
    sizes += [4 * sampled, 4 * (sampled + 1) if sampled else 0, sampled * PENALTIES.itemsize]
    sizes += [sampled * CHAIN.itemsize, shape.max_edits * EDIT.itemsize]
    at, offsets = 0, []
    for size in sizes:
        offsets.append(at)
        at += -(-size // 16) * 16
    names = [part.name for part in fields(ControlLayout)][: len(offsets)]
    rest = {"n_bytes": at, "n_tokens": n, "max_pages": max_pages, "max_deltas": max_deltas}
    return ControlLayout(**dict(zip(names, offsets, strict=True)), **rest)


class ControlRing:
    """`RING` blocks of pinned memory, and views of them for each layout."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        """Raises: PinningFailed, DeviceLost."""
        self.stride = -(-block_bytes // 256) * 256
        self._buffer = PinnedBuffer(device, RING * self.stride, "control")

    def address_on(self, device: Device) -> int:
        """For the kernels of a GPU."""
        return self._buffer.address_on(device)

    def writers(self, layout: ControlLayout) -> list[ControlWriter]:
        """One for each block."""
        return [
            ControlWriter(self._buffer.view[i * self.stride :][: self.stride], layout)
            for i in range(RING)
        ]

    def close(self) -> None:
        self._buffer.close()


class ControlWriter:
    """One block of the ring, seen through a layout."""

    def __init__(self, block: U8, layout: ControlLayout) -> None:
        words = block.view(np.int32)

        def part(start: int, end: int) -> I32:
            return words[start // 4 : end // 4]

        self._counts = part(layout.counts, layout.token_ids)
        self._token_ids = part(layout.token_ids, layout.positions)
        self._positions = part(layout.positions, layout.rows)
        self._rows = part(layout.rows, layout.cell_pages)
        self._cell_pages = part(layout.cell_pages, layout.output_tokens)
        self._output_tokens = part(layout.output_tokens, layout.page_tables)
        tables = part(layout.page_tables, layout.spans)
        n_rows = len(tables) // layout.max_pages
        self._page_tables = tables[: n_rows * layout.max_pages].reshape(n_rows, layout.max_pages)
        self._max_pages = layout.max_pages
        self._spans = part(layout.spans, layout.memories).reshape(-1, 4)
        self._memories = block[layout.memories : layout.k]
        self._n_tokens = layout.n_tokens
        self._k = part(layout.k, layout.first_edit)
        self._first_edit = part(layout.first_edit, layout.penalties)
        self._penalties = block[layout.penalties : layout.chains].view(PENALTIES)
        self._chains = block[layout.chains : layout.edits].view(CHAIN)
        self._edits = block[layout.edits : layout.n_bytes].view(EDIT)
        deltas = block[layout.n_bytes : layout.block_bytes]
        self._n_deltas = deltas[:4].view(np.uint32)
        self._deltas = deltas[DELTAS_HEADER_BYTES:].view(np.uint64).reshape(-1, 4)

    def write(self, step: Step, cell_pages: I32, deltas: Deltas | tuple[()] = ()) -> None:
        """Write the step; `cell_pages` i32[n_tokens] are the pages that hold its tokens.

        Raises: EngineBug for more changes than there is room for.
        """
        n, n_outputs = len(step.token_ids), len(step.output_tokens)
        n_sequences, width = step.page_tables.shape
        counts = self._counts
        counts[:4] = n, n_outputs, n_sequences, step.follows
        self._token_ids[:n] = step.token_ids
        self._positions[:n] = step.positions
        self._rows[:n] = step.rows
        self._cell_pages[:n] = cell_pages
        self._output_tokens[:n_outputs] = step.output_tokens
        width = min(width, self._max_pages)
        self._page_tables[:n_sequences, :width] = step.page_tables[:, :width]
        if step.state_slots is not None:
            self._spans[:n_sequences] = spans_of(step)
        if step.sampling is not None and len(self._k):
            self._write_sampling(step.sampling)
        self._n_deltas[0] = len(deltas)
        if len(deltas):
            if len(deltas) > len(self._deltas):
                raise EngineBug(f"{len(deltas)} changes of the table, room for {len(self._deltas)}")
            self._deltas[: len(deltas)] = deltas

    def write_memories(self, gathered: Sequence[U8]) -> None:
        """Write the rows of the step's tokens, u8[n_tokens, bytes] of each memory.

        They lie one after another; there is room for as many as the layout has tokens, of rows
        whose bytes are rounded up to a multiple of 16.
        """
        start = 0
        for rows in gathered:
            self._memories[start : start + rows.size] = rows.reshape(-1)
            start += self._n_tokens * (-(-rows.shape[1] // 16) * 16)

    def _write_sampling(self, works: tuple[DeviceWork, ...]) -> None:
        # Steps of other layouts have left their own values here.
        self._first_edit[0] = first = 0
        for row, work in enumerate(works):
            self._k[row] = work.k
            self._penalties[row] = work.penalties[0]
            self._chains[row] = ANY_CHAIN if work.chain is None else work.chain[0]
            end = first + len(work.edits)
            if end > first:
                self._edits[first:end] = work.edits
            self._first_edit[row + 1] = first = end


def cell_pages(step: Step, page_tokens: int) -> I32:
    """i32[n_tokens]: the page that holds each token; raises IndexError beyond the table."""
    if len(step.rows) == 1:  # several times as quick as arrays of indices
        row, column = step.rows.item(), step.positions.item() // page_tokens
        return step.page_tables[row : row + 1, column]
    pages: I32 = step.page_tables[step.rows, step.positions // page_tokens]
    return pages


def spans_of(step: Step) -> I32:
    """i32[n_sequences, 4]: first token, tokens, position of the first and state slot of each."""
    n_sequences = len(step.page_tables)
    spans = np.zeros((n_sequences, 4), np.int32)
    if step.state_slots is not None:
        spans[:, 3] = step.state_slots
    first = np.flatnonzero(np.diff(step.rows, prepend=-1))  # tokens of a sequence are together
    rows = step.rows[first]
    spans[rows, 0] = first
    spans[rows, 1] = np.diff(first, append=len(step.rows))
    spans[rows, 2] = step.positions[first]
    return spans
