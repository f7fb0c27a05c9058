"""Products of several matrices with a vector of numbers each, as one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.gpu.expert import ADDRESSES, expert_down
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    Multiprocessors,
    best_team,
    down_launch,
    in_one_wave,
)
from ops.quants import BlockFormat
from ops.quants.block import ACTIVATION_GROUP
from runtime.engine.gpu.plan_parts import PlanParts, record_fields

DOWN = 2
"""The column of the table that `ops.gpu.expert.expert_down` reads."""

MATRIX_ALIGN = 16
"""Bytes of which addresses of matrices are multiples."""


def are_slot_matrices(fmt: BlockFormat, n: int, n_rows: int) -> bool:
    """Whether the kernel takes neighbouring matrices f32[n_rows, n] of this format."""
    if fmt.name not in BLOCK_FORMATS:
        return False
    return (
        n % ACTIVATION_GROUP[fmt.activation] == 0 and n_rows * fmt.row_bytes(n) % MATRIX_ALIGN == 0
    )


def add_slot_products(
    parts: PlanParts,
    name: str,
    fmt: BlockFormat,
    size: tuple[int, int],
    matrices: Sequence[int],
    rows: tuple[int, int],
) -> None:
    """y[s] = the s-th matrix times x[s]; the rows are quantized by the launch itself.

    size      values of a row of x, then of y
    matrices  their addresses
    rows      addresses of x and y, f32 rows one behind the other
    """
    n, n_rows = size
    n_pairs = -(-n_rows // 2)
    gpu = Multiprocessors(parts.gpu.n_multiprocessors, parts.gpu.block_shared_bytes)
    launch = down_launch(fmt, best_team(fmt, n), overlapped=parts.overlapped)
    launch = in_one_wave(launch, fmt, n, len(matrices) * n_pairs, gpu)
    table = np.zeros((len(matrices), ADDRESSES), np.uint64)
    table[:, DOWN] = matrices
    parts.plan.add(
        name,
        expert_down(fmt, launch),
        launch.grid(n_pairs, len(matrices)),
        {
            "h": rows[0],
            "experts": parts.constants.place(table),
            "table": parts.grid_table(fmt),
            "y": rows[1],
            "choices": 0,
            "scales": 0,
            "biases": 0,
            "n": n,
            "n_rows": n_rows,
            "rounds": launch.rounds,
            **record_fields(fmt.activation, n),
        },
        shared_bytes=launch.shared_bytes(fmt, n),
        overlapped=parts.overlapped,
    )
