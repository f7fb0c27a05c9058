"""The control block: everything a step takes from the host, in one piece of pinned memory.

`ops.gpu.step_io` says how the GPU reads it.  The ring has a block for each step that may still be
read while the next one is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.gpu.step_io import DELTA_BYTES, DELTAS_HEADER_BYTES, RING
from runtime.cuda.device import Device
from runtime.cuda.memory import PinnedBuffer
from runtime.engine.gpu.step_shape import StepShape
from runtime.engine.step import I32, Step
from runtime.errors import EngineBug

U8 = NDArray[np.uint8]
Delta = tuple[int, int, int, int]
"""A row of the model's table of experts, and its new addresses of gate, up and down."""


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
    n_bytes: int
    max_pages: int
    max_deltas: int

    @property
    def block_bytes(self) -> int:
        return self.n_bytes + DELTAS_HEADER_BYTES + self.max_deltas * DELTA_BYTES


def control_layout(shape: StepShape, page_tokens: int, max_deltas: int) -> ControlLayout:
    """The layout of steps of this shape.

    u32 counts[4]: tokens, outputs, sequences, 0; then i32 token_ids, positions, rows, cell_pages,
    each [n_tokens], output_tokens[n_outputs], page_tables[n_sequences, max_pages].
    """
    max_pages = -(-shape.n_context // page_tokens)
    n, at = shape.n_tokens, 0
    offsets = []
    for n_words in (4, n, n, n, n, shape.n_outputs, shape.n_sequences * max_pages):
        offsets.append(at)
        at += -(-n_words // 4) * 16
    counts, token_ids, positions, rows, pages, output_tokens, page_tables = offsets
    return ControlLayout(
        counts, token_ids, positions, rows, pages, output_tokens, page_tables,
        n_bytes=at, max_pages=max_pages, max_deltas=max_deltas,
    )  # fmt: skip


class ControlRing:
    """`RING` blocks of pinned memory, and views of them for each layout."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        """Raises: PinningFailed, DeviceLost."""
        self.stride = -(-block_bytes // 256) * 256
        self._buffer = PinnedBuffer(device, RING * self.stride, "control")

    @property
    def address(self) -> int:
        """For kernels."""
        return self._buffer.address

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
        tables = part(layout.page_tables, layout.n_bytes)
        n_rows = len(tables) // layout.max_pages
        self._page_tables = tables[: n_rows * layout.max_pages].reshape(n_rows, layout.max_pages)
        self._max_pages = layout.max_pages
        deltas = block[layout.n_bytes : layout.block_bytes]
        self._n_deltas = deltas[:4].view(np.uint32)
        self._deltas = deltas[DELTAS_HEADER_BYTES:].view(np.uint64).reshape(-1, 4)

    def write(self, step: Step, cell_pages: I32, deltas: Sequence[Delta] = ()) -> None:
        """Write the step; `cell_pages` i32[n_tokens] are the pages that hold its tokens.

        Raises: EngineBug for more changes than there is room for.
        """
        n, n_outputs = len(step.token_ids), len(step.output_tokens)
        n_sequences, width = step.page_tables.shape
        counts = self._counts
        counts[0], counts[1], counts[2] = n, n_outputs, n_sequences
        self._token_ids[:n] = step.token_ids
        self._positions[:n] = step.positions
        self._rows[:n] = step.rows
        self._cell_pages[:n] = cell_pages
        self._output_tokens[:n_outputs] = step.output_tokens
        width = min(width, self._max_pages)
        self._page_tables[:n_sequences, :width] = step.page_tables[:, :width]
        self._n_deltas[0] = len(deltas)
        if deltas:
            if len(deltas) > len(self._deltas):
                raise EngineBug(f"{len(deltas)} changes of the table, room for {len(self._deltas)}")
            self._deltas[: len(deltas)] = deltas


def cell_pages(step: Step, page_tokens: int) -> I32:
    """i32[n_tokens]: the page that holds each token; raises IndexError beyond the table."""
    pages: I32 = step.page_tables[step.rows, step.positions // page_tokens]
    return pages
