"""N-gram tables as launches: rows that the host gathered, into the residual streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.gpu import embed as embed_kernel
from ops.gpu.embed import embed
from ops.gpu.ngram_memory import (
    N_TAPS,
    ngram_convolution,
    ngram_convolution_grid,
    ngram_gate,
)
from ops.gpu.row_launch import GPU_FORMATS
from ops.gpu.streams import N_STREAM, block_of
from ops.gpu.take_rows import take_rows, take_rows_grid
from runtime.engine.gpu.matrix_launches import Output, Product, add_products, want_inputs
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, RowSource
from runtime.engine.gpu.row_launches import add_records
from runtime.models.model import Model
from runtime.models.ngram_memory import NgramMemorySpec

PHASE = "memory"
"""Of a layer: `Room.place`."""
ROW_VALUES = 16
"""Rows of f32 values with nothing between them begin at multiples of 64 bytes."""
ROW_ALIGN = 16
"""Bytes: rows of a table begin at a multiple, in a control block as on the GPU."""


class MemoryLaunches:
    """The launches of layers with a memory, in the order of their rows in the control block."""

    def __init__(self, parts: PlanParts, bytes_before: int) -> None:
        """bytes_before: of a token in the block, before those of the first memory."""
        self._parts, self._bytes_before = parts, bytes_before

    def add(self, layer: int, memory: NgramMemorySpec, x: int, state_offset: int) -> None:
        """Add the rows to the streams at x; the memory's state is so far into the layer's."""
        parts, n = self._parts, self._parts.n_tokens
        n_embd, width = memory.value.n_out, memory.key.n_out
        gathered = DeviceRows(parts.room, "gathered", n, memory.key.n_in, PHASE)
        at = gathered.want("f32")
        want_inputs(parts, memory.linears, gathered)
        self._rows(layer, memory, at)
        add_records(parts, f"{layer}.memory", at, gathered)
        keys = parts.room.place("memory keys", 4 * n * width, PHASE)
        values = parts.room.place("memory values", 4 * n * n_embd, PHASE)
        for name, linear, out in (("key", memory.key, keys), ("value", memory.value, values)):
            add_products(
                parts,
                f"{layer}.memory_{name}",
                [Product(linear)],
                gathered,
                Output(out, linear.n_out),
                parts.token_count,
                n,
            )
        u = parts.room.place("memory convolved", 4 * n * width, PHASE)
        self._gate(layer, memory, x, keys, values, u)
        self._convolution(layer, memory, x, u, state_offset)

    def _rows(self, layer: int, memory: NgramMemorySpec, x: int) -> None:
        """The gathered blocks as numbers, f32[n_tokens, n_in] at x."""
        parts, n, fmt = self._parts, self._parts.n_tokens, self._parts.format_of(memory.table)
        blocks = parts.control("memories") + n * self._bytes_before
        n_bytes = row_bytes(memory, parts.model)
        if parts.rows is not None:
            self._take(layer, blocks, n_bytes, parts.rows)
        self._bytes_before += n_bytes
        parts.plan.add(
            f"{layer}.memory_rows",
            embed(fmt, overlapped=parts.overlapped),
            embed_kernel.grid(memory.key.n_in, n),
            {
                "token_ids": parts.constants.place(np.arange(n, dtype=np.int32)),
                "sampled": 0,
                "weights": blocks,
                "table": parts.grid_table(fmt),
                "x": x,
                "count": parts.token_count,
                "n": memory.key.n_in,
            },
            shared_bytes=embed_kernel.shared_bytes(fmt),
            overlapped=parts.overlapped,
        )

    def _take(self, layer: int, target: int, n_bytes: int, rows: RowSource) -> None:
        """Rows of n_bytes a token from where the team leaves them."""
        parts = self._parts
        parts.plan.add(
            f"{layer}.take_rows",
            take_rows(overlapped=parts.overlapped),
            take_rows_grid(parts.n_tokens, n_bytes),
            {
                "epoch": parts.memory.epoch,
                "count": parts.token_count,
                "words": rows.words,
                "source": rows.source + rows.most * self._bytes_before,
                "stride": rows.stride,
                "target": target,
                "row_bytes": n_bytes,
                "patience": rows.patience_ns,
            },
            overlapped=parts.overlapped,
        )

    def _gate(
        self, layer: int, memory: NgramMemorySpec, x: int, keys: int, values: int, u: int
    ) -> None:
        parts, vector = self._parts, self._parts.weights.vector
        parts.plan.add(
            f"{layer}.memory_gate",
            ngram_gate(block_of(memory.value.n_out), overlapped=parts.overlapped),
            (N_STREAM, parts.n_tokens),
            {
                "count": parts.token_count,
                "x": x,
                "keys": keys,
                "values": values,
                "key_norm": vector(memory.key_norm),
                "query_norm": vector(memory.query_norm),
                "conv_norm": vector(memory.conv_norm),
                "u": u,
                "n": memory.value.n_out,
                "eps": parts.model.spec.eps,
            },
            overlapped=parts.overlapped,
        )

    def _convolution(
        self, layer: int, memory: NgramMemorySpec, x: int, u: int, state_offset: int
    ) -> None:
        parts, n_channels, states = self._parts, memory.key.n_out, self._parts.held_states
        parts.plan.add(
            f"{layer}.memory_convolution",
            ngram_convolution(overlapped=parts.overlapped),
            ngram_convolution_grid(n_channels, parts.n_tokens),
            {
                "counts": parts.token_count,
                "rows": parts.control("rows"),
                "spans": parts.control("spans"),
                "states": states.address(layer) + state_offset,
                "u": u,
                "taps": parts.weights.vector(memory.conv),
                "x": x,
                "slot_bytes": states.slot_bytes,
                "n_channels": n_channels,
                "dilation": memory.n_gram,
            },
            overlapped=parts.overlapped,
        )


def row_bytes(memory: NgramMemorySpec, model: Model) -> int:
    """Bytes of a token's rows of the table, and of what lies between them and the next token's."""
    n_bytes = model.weights[memory.table].format.row_bytes(memory.key.n_in)
    return -(-n_bytes // ROW_ALIGN) * ROW_ALIGN


def memory_bytes(model: Model) -> int:
    """Bytes of a token that the host gathers for the model's memories."""
    return sum(row_bytes(memory, model) for memory in model.spec.memories)


def memory_obstacles(model: Model) -> Iterator[str]:
    """Why the kernels cannot compute a model's memories."""
    spec = model.spec
    for memory in spec.memories:
        name = model.weights[memory.table].format.name
        if name not in GPU_FORMATS:
            yield f"tables of format {name}"
        if spec.n_stream != N_STREAM or memory.n_taps != N_TAPS:
            yield f"a memory of {memory.n_taps} taps and {spec.n_stream} streams"
        if memory.key.n_in % ROW_VALUES:
            yield f"a memory of rows of {memory.key.n_in} values"
