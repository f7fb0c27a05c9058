"""The GPU kernels of a routed expert, and the reference of both: gate and up, then down.

An expert is three matrices somewhere in memory; the kernels get their addresses from a table, and
an address of 0 says that the expert is not on this device.
"""

from __future__ import annotations

import numpy as np

from ops.arithmetic import activation_layout, dot_rows, quantize_rows, silu_mul
from ops.kernel import (
    CHUNK_ELEMS,
    Kernel,
    activation_defines,
    format_defines,
    format_table,
    launch_bounds,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

GPU_FORMATS = ("Q4_K", "Q6_K", "Q8_0", "IQ3_XXS")
"""Formats with a `dot` fragment."""

BLOCK = 512
MIN_BLOCKS = 2
"""Blocks of a multiprocessor that have to fit in its registers."""

TEAM = 16
"""Lanes that share a pair of rows."""

_RECORD = (("scales_offset", "u32"), ("sums_offset", "u32"), ("record_bytes", "u32"))


def gate_up_reference(fmt: BlockFormat, gate: U8, up: U8, records: U8) -> F32:
    """Rows u8[n_rows, row_bytes] of two matrices x records -> h f32[n_tokens, n_rows]."""
    return silu_mul(dot_rows(fmt, gate, records), dot_rows(fmt, up, records))


def down_reference(fmt: BlockFormat, down: U8, h: F32) -> F32:
    """Rows u8[n_rows, row_bytes] x h f32[n_tokens, n] -> f32[n_tokens, n_rows]."""
    return dot_rows(fmt, down, quantize_rows(fmt.activation, h))


def gate_up(fmt: BlockFormat, block: int = BLOCK, min_blocks: int = MIN_BLOCKS, team: int = TEAM) -> Kernel:
    """The kernel of gate, up and their activation; grid (ceil(n_rows / teams), n_slots).

    Raises:
        LookupError: the format has no fragment yet.
    """
    return Kernel(
        entry=f"expert_gate_up_{_known(fmt).name.lower()}",
        source="expert_gate_up.ptx",
        defines=format_defines(fmt, team) | {"LAUNCH_BOUNDS": launch_bounds(block, min_blocks)},
        params=(
            *((name, "u64") for name in ("records", "experts", "table", "h")),
            *((name, "u32") for name in ("n", "n_rows", "n_used")),
            *_RECORD,
        ),
        block=block,
        reference=gate_up_reference,
    )


def down(fmt: BlockFormat, block: int = BLOCK, min_blocks: int = MIN_BLOCKS, team: int = TEAM) -> Kernel:
    """The kernel of down, one output a slot; grid (ceil(n_rows / (2 * teams)), n_slots).

    Raises:
        LookupError: the format has no fragment yet.
    """
    return Kernel(
        entry=f"expert_down_{_known(fmt).name.lower()}",
        source="expert_down.ptx",
        defines=format_defines(fmt, team)
        | activation_defines(fmt.activation)
        | {"LAUNCH_BOUNDS": launch_bounds(block, min_blocks)},
        params=(
            *((name, "u64") for name in ("h", "experts", "table", "y")),
            *((name, "u32") for name in ("n", "n_rows")),
            *_RECORD,
        ),
        block=block,
        reference=down_reference,
    )


def shared_bytes(fmt: BlockFormat, n: int, block: int = BLOCK, team: int = TEAM) -> int:
    """Dynamic shared memory of either kernel for rows of n values."""
    row_bytes, chunk_bytes = fmt.row_bytes(n), fmt.row_bytes(CHUNK_ELEMS)
    piece = -(-min(row_bytes, chunk_bytes) // 16) * 16 + 16
    n_buffers = 2 if row_bytes > chunk_bytes else 1
    record_bytes = activation_layout(fmt.activation, n)[2]
    return record_bytes + format_table(fmt).nbytes + block // team * n_buffers * 2 * piece


def expert_addresses(gate: int, up: int, down_: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """An expert's row of the address table: u64[4]."""
    return np.array([gate, up, down_, 0], np.uint64)


def _known(fmt: BlockFormat) -> BlockFormat:
    if fmt.name not in GPU_FORMATS:
        raise LookupError(f"no GPU kernels for {fmt.name} yet; there are {', '.join(GPU_FORMATS)}")
    return FORMATS[fmt.name]
