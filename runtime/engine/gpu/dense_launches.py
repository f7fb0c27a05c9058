"""The down product of dense blocks of few tokens, which makes its input itself."""

from __future__ import annotations

from ops.gpu.dense_down import DENSE_FORMATS, dense_down
from ops.gpu.row_launch import Multiprocessors, best_team, down_launch, in_one_wave
from runtime.engine.gpu.expert_launches import ACTIVATION_NUMBERS, GateUp
from runtime.engine.gpu.matrix_launches import GEMM_ROWS
from runtime.engine.gpu.plan_parts import PlanParts, record_fields
from runtime.models.spec import DenseSpec

MOST_VALUES = 4096
"""Of a hidden row: every block makes it anew, which takes a multiprocessor longer than its part of
the weights where there are many."""


def takes_dense_down(parts: PlanParts, block: DenseSpec) -> bool:
    """Whether one launch has the block's activation and its down product."""
    down, few = block.down, parts.n_tokens < GEMM_ROWS and block.n_ff <= MOST_VALUES
    plain = down.bias is None and down.scale is None
    return few and plain and parts.format_of(down.weight).name in DENSE_FORMATS


def add_dense_down(
    parts: PlanParts, name: str, block: DenseSpec, rows: GateUp, result: int
) -> None:
    """f32[n_tokens, n_embd] at `result` = down activation(gate, up)."""
    n, n_rows = block.n_ff, block.down.n_out
    fmt, n_pairs = parts.format_of(block.down.weight), -(-n_rows // 2)
    gpu = Multiprocessors(parts.gpu.n_multiprocessors, parts.gpu.block_shared_bytes)
    launch = down_launch(fmt, best_team(fmt, n), overlapped=parts.overlapped)
    launch = in_one_wave(launch, fmt, n, parts.n_tokens * n_pairs, gpu)
    parts.plan.add(
        name,
        dense_down(fmt, launch),
        launch.grid(n_pairs, parts.n_tokens),
        {
            "gate": rows.gate,
            "up": rows.up,
            "x_stride": rows.stride,
            "matrix": parts.weights.matrix(block.down.weight),
            "table": parts.grid_table(fmt),
            "y": result,
            "count": parts.token_count,
            "n": n,
            "n_rows": n_rows,
            "rounds": launch.rounds,
            "activation": ACTIVATION_NUMBERS[block.activation],
            "limit": block.activation_limit,
            **record_fields(fmt.activation, n),
        },
        shared_bytes=launch.shared_bytes(fmt, n),
        overlapped=parts.overlapped,
    )
