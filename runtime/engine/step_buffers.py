"""StepBuffers: where a step's inputs are written for the compiled jobs, and its logits appear."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.cpu.attention import ITEM
from ops.cpu.job import record
from ops.cpu.kv_layout import BLOCK_TOKENS
from ops.cpu.ledger import is_dry
from ops.cpu.program import address_of, aligned
from ops.cpu.spans import SPAN
from ops.cpu.step_inputs import FITS, STEP_INPUTS, fill_function
from runtime.engine.activation_rows import Rows
from runtime.engine.executor import ExecutorLimits
from runtime.engine.step import Step, StepKind
from runtime.errors import EngineBug


class StepBuffers:
    """Arrays of fixed size that every step overwrites; the jobs hold their addresses.

    tile_tokens  prompt tokens of one attention work item
    n_positions  positions that a sequence can reach
    """

    def __init__(self, limits: ExecutorLimits, tile_tokens: int) -> None:
        n = limits.max_step_tokens
        self._limits = limits
        self.n_positions = limits.n_pages * limits.page_tokens
        self.max_partials = limits.max_sequences * -(-self.n_positions // BLOCK_TOKENS)
        self.n_tokens = aligned(1, np.int64)
        self.n_outputs = aligned(1, np.int64)
        self.positions = aligned(n, np.int32)
        self.sequences = aligned(n, np.int32)
        self.cell_pages = aligned(n, np.int32)
        self.page_tables = aligned((limits.max_sequences, limits.n_pages), np.int32)
        self.items = aligned(max(n, self.max_partials), ITEM)
        self.partial_spans = aligned((n, 2), np.int32)
        self.output_tokens = aligned(n, np.int32)
        self.spans = aligned(limits.max_sequences, SPAN)
        self.not_finite = aligned(1 + n, np.int32)  # of any output, then of each
        self.logits = aligned((n, limits.n_vocab), np.float32)
        self._is_output = aligned(n, np.int32)
        self._counts = aligned(3, np.int64)
        self._inputs = record(
            STEP_INPUTS,
            max_tokens=n,
            max_sequences=limits.max_sequences,
            n_vocab=limits.n_vocab,
            n_positions=self.n_positions,
            tile_tokens=tile_tokens,
            n_tokens=address_of(self.n_tokens),
            n_outputs=address_of(self.n_outputs),
            positions=address_of(self.positions),
            sequences=address_of(self.sequences),
            cell_pages=address_of(self.cell_pages),
            page_tables=address_of(self.page_tables),
            table_stride=self.page_tables.strides[0],
            items=address_of(self.items),
            partial_spans=address_of(self.partial_spans),
            output_tokens=address_of(self.output_tokens),
            is_output=address_of(self._is_output),
            not_finite=address_of(self.not_finite),
            counts=address_of(self._counts),
        )
        self._address = address_of(self._inputs)
        if not is_dry():
            self._fill = fill_function()

    def embed_from(self, table: NDArray[np.float32], x: Rows) -> None:
        """Let `fill` copy the tokens' rows of `table`, f32[n_vocab, n_embd], to `x`."""
        self._table = table
        self._inputs["embedding"] = address_of(table)
        self._inputs["embedding_stride"] = table.strides[0]
        self._inputs["x"], self._inputs["x_stride"] = x.address, x.stride

    def fill(self, step: Step) -> tuple[int, int, int]:
        """Write the step's inputs.

        Returns the attention work items, those of them that outputs need, and whether (0 or 1)
        the items' results are merged later.
        Raises: EngineBug for a step beyond the limits.
        """
        if (
            self._fill(
                self._address,
                step.kind is StepKind.DECODE,
                step.token_ids,
                step.positions,
                step.rows,
                step.page_tables,
                step.output_tokens,
            )
            != FITS
        ):
            raise EngineBug(
                f"a step of {step.n_tokens} tokens and {len(step.page_tables)} sequences, up to "
                f"position {step.positions.max(initial=-1)}, is beyond the executor's "
                f"{self._limits} or names a token that does not exist"
            )
        if step.state_slots is not None:
            self._fill_spans(step, step.state_slots)
        n_items, n_output_items, split = self._counts.tolist()
        return n_items, n_output_items, split

    def _fill_spans(self, step: Step, slots: NDArray[np.int32]) -> None:
        n, n_slots = len(slots), self._limits.n_state_slots
        if n != len(step.page_tables) or not ((slots >= 0) & (slots < n_slots)).all():
            raise EngineBug(
                f"state slots {slots.tolist()} of {len(step.page_tables)} sequences; the executor "
                f"has {n_slots}"
            )
        ends = np.searchsorted(step.rows, np.arange(n), side="right")
        spans, starts = self.spans[:n], np.concatenate(([0], ends[:-1]))
        spans["token"], spans["n_tokens"], spans["slot"] = starts, ends - starts, slots
        spans["position"] = step.positions[starts]
