"""StepBuffers: where a step's inputs are written for the compiled jobs, and its logits appear."""

from __future__ import annotations

import numpy as np

from ops.cpu.attention import BLOCK_TOKENS, ITEM
from ops.cpu.kv_layout import PAGE_TOKENS
from ops.cpu.program import aligned
from runtime.engine.executor import ExecutorLimits
from runtime.engine.step import Step, StepKind


class StepBuffers:
    """Arrays of fixed size that every step overwrites; the jobs hold their addresses.

    tile_tokens  prompt tokens of one attention work item
    n_positions  positions that a sequence can reach
    """

    def __init__(self, limits: ExecutorLimits, tile_tokens: int) -> None:
        n = limits.max_step_tokens
        self.n_positions = limits.n_pages * limits.page_tokens
        self.max_partials = limits.max_sequences * -(-self.n_positions // BLOCK_TOKENS)
        self._tile = tile_tokens
        self.n_tokens = aligned(1, np.int64)
        self.n_outputs = aligned(1, np.int64)
        self.positions = aligned(n, np.int32)
        self.sequences = aligned(n, np.int32)
        self.cell_pages = aligned(n, np.int32)
        self.page_tables = aligned((limits.max_sequences, limits.n_pages), np.int32)
        self.items = aligned(max(n, self.max_partials), ITEM)
        self.partial_spans = aligned((n, 2), np.int32)
        self.output_tokens = aligned(n, np.int32)
        self.not_finite = aligned(n, np.int32)
        self.logits = aligned((n, limits.n_vocab), np.float32)

    def fill(self, step: Step) -> tuple[int, int]:
        """Write the step's inputs; (attention work items, whether results are merged later)."""
        n, n_outputs = step.n_tokens, len(step.output_tokens)
        self.n_tokens[0], self.n_outputs[0] = n, n_outputs
        self.positions[:n] = step.positions
        self.sequences[:n] = step.rows
        n_sequences, n_table = step.page_tables.shape
        self.page_tables[:n_sequences, :n_table] = step.page_tables
        self.cell_pages[:n] = step.page_tables[step.rows, step.positions // PAGE_TOKENS]
        self.output_tokens[:n_outputs] = step.output_tokens
        self.not_finite[:n_outputs] = 0
        if step.kind is StepKind.DECODE:
            return self._split_by_block(step)
        return self._split_by_tile(step), 0

    def _split_by_tile(self, step: Step) -> int:
        """Tiles of prompt tokens, the longest contexts first."""
        starts = np.flatnonzero(np.r_[True, np.diff(step.rows) != 0])
        ends = np.r_[starts[1:], step.n_tokens]
        tiles = [
            (token, min(self._tile, end - token))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            for token in range(start, end, self._tile)
        ]
        items = self.items[: len(tiles)]
        items["token"] = [token for token, _ in tiles]
        items["n_tokens"] = [count for _, count in tiles]
        last = items["token"] + items["n_tokens"] - 1
        items["first_block"] = 0
        items["end_block"] = step.positions[last] // BLOCK_TOKENS + 1
        items["partial"] = -1
        items[:] = items[np.argsort(-items["end_block"], kind="stable")]
        return len(tiles)

    def _split_by_block(self, step: Step) -> tuple[int, int]:
        """One item a token and block where any context is longer than a block."""
        n = step.n_tokens
        n_blocks = step.positions // BLOCK_TOKENS + 1
        longest = int(n_blocks.max())
        if longest == 1:
            items = self.items[:n]
            items["token"] = np.arange(n)
            items["n_tokens"] = items["end_block"] = 1
            items["first_block"] = 0
            items["partial"] = -1
            return n, 0
        first = np.cumsum(n_blocks) - n_blocks
        tokens = np.repeat(np.arange(n), n_blocks)
        n_items = len(tokens)
        items = self.items[:n_items]
        items["token"] = tokens
        items["n_tokens"] = 1
        items["first_block"] = np.arange(n_items) - first[tokens]
        items["end_block"] = items["first_block"] + 1
        items["partial"] = np.arange(n_items)
        self.partial_spans[:n, 0] = first
        self.partial_spans[:n, 1] = n_blocks
        return n_items, 1
