"""The launches that `bench kernels_gpu` times, put together as the engine's plans do it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.kernel_bed import Bed, Work
from ops.arithmetic import activation_layout
from ops.gpu.expert import expert_down, expert_gate_up
from ops.gpu.gemm import best_tile, gemm
from ops.gpu.linear import Segment, linear, segments
from ops.gpu.row_launch import best_launch, best_team, down_launch, expert_launch, gate_up_launch
from ops.quants import BlockFormat
from runtime.cuda.graph import Launch

N_EXPERT, N_USED = 128, 8
"""Of a layer; a token's are drawn without regard to those of other tokens."""

PLAIN_GEMM = (
    *("rows", "table", "y_step", "out_rows", "bias", "bias_step"),
    *("factors", "factors_step", "n_groups", "column"),
)
"""Arguments of `ops.gpu.gemm` that are 0 for one matrix and rows in their order."""


def experts(bed: Bed, fmt: BlockFormat, n: int, n_ff: int, n_tokens: int) -> Work:
    """Gate and up of n_ff rows of n values, then down, of all slots of so many tokens."""
    n_slots = n_tokens * N_USED
    matrices = bed.weights([(fmt, n, n_ff), (fmt, n, n_ff), (fmt, n_ff, n)])
    per_expert = 2 * n_ff * fmt.row_bytes(n) + n * fmt.row_bytes(n_ff)
    chosen = _chosen(len(matrices), n_tokens, bed.turns(per_expert * n_slots))
    addresses = np.zeros((len(chosen), n_slots, 4), np.uint64)
    addresses[..., :3] = np.array(matrices, np.uint64)[chosen]
    table, grid_table = bed.place(addresses), bed.grid_table(fmt)
    tables = [table + addresses[0].nbytes * index for index in range(len(chosen))]
    n_bytes = round(per_expert * np.mean([len(np.unique(of_turn)) for of_turn in chosen]))
    early, n_sms = {"overlapped": bed.overlapped}, bed.multiprocessors
    first, second = (
        expert_launch(
            make(fmt, best_team(fmt, width), **early), fmt, width, n_slots * n_pairs, n_sms
        )
        for make, width, n_pairs in ((gate_up_launch, n, n_ff), (down_launch, n_ff, -(-n // 2)))
    )
    records = bed.zeros(n_tokens * activation_layout(fmt.activation, n)[2])
    h, y = bed.zeros(4 * n_slots * n_ff), bed.zeros(4 * n_slots * n)
    common = {"h": h, "table": grid_table, "choices": 0}

    def turn(experts_at: int) -> list[Launch]:
        here = {**common, "experts": experts_at}
        gate_up = bed.launch(
            expert_gate_up(fmt, first),
            first.grid(n_ff, n_slots),
            {
                **here,
                **dict.fromkeys(("gate_scales", "gate_biases", "up_scales", "up_biases"), 0),
                **_record(fmt, n),
                "records": records,
                "n": n,
                "n_rows": n_ff,
                "n_used": N_USED,
                "rounds": first.rounds,
                "activation": 0,
                "limit": 0.0,
            },
            first.shared_bytes(fmt, n),
        )
        down = bed.launch(
            expert_down(fmt, second),
            second.grid(-(-n // 2), n_slots),
            {
                **here,
                **_record(fmt, n_ff),
                "y": y,
                "scales": 0,
                "biases": 0,
                "n": n_ff,
                "n_rows": n,
                "rounds": second.rounds,
            },
            second.shared_bytes(fmt, n_ff),
        )
        return [gate_up, down]

    return Work(f"{n}x{n_ff}", n_slots, n_bytes, [turn(at) for at in tables])


def single_linear(bed: Bed, fmt: BlockFormat, n: int, n_rows: int) -> Work:
    """A matrix with n_rows rows of n values, times one vector."""
    launch = best_launch(fmt, n, n_rows=n_rows, overlapped=bed.overlapped)
    n_bytes = n_rows * fmt.row_bytes(n)
    matrices = bed.weights([(fmt, n, n_rows)])[: bed.turns(n_bytes)]
    x = bed.zeros(activation_layout(fmt.activation, n)[2])
    y, count = bed.zeros(4 * n_rows), bed.place(np.ones(1, np.uint32))
    grid_table = bed.grid_table(fmt)

    def turn(address: int) -> list[Launch]:
        table, n_blocks = segments(launch, [Segment(address, n_rows)])
        arguments = {
            **_record(fmt, n),
            "records": x,
            "segments": bed.place(table),
            "table": grid_table,
            "y": y,
            "count": count,
            "n": n,
            "n_segments": 1,
            "y_stride": n_rows,
            "late": 0,
        }
        shared_bytes = launch.shared_bytes(fmt, n)
        return [bed.launch(linear(fmt, launch), (n_blocks, 1), arguments, shared_bytes)]

    return Work(f"{n}x{n_rows}", 1, n_bytes, [turn(m[0]) for m in matrices])


def dense_gemm(bed: Bed, fmt: BlockFormat, n: int, n_rows: int, n_slots: int) -> Work:
    """A matrix with n_rows rows of n values, times several vectors by tensor cores."""
    shared_bytes = bed.multiprocessors.shared_bytes
    tile = best_tile(fmt, n_rows, n_slots, shared_bytes=shared_bytes)
    n_bytes = n_rows * fmt.row_bytes(n)
    matrices = bed.weights([(fmt, n, n_rows)])[: bed.turns(n_bytes)]
    x = bed.zeros(n_slots * activation_layout(fmt.activation, n)[2])
    y, count = bed.zeros(4 * n_slots * n_rows), bed.place(np.array([n_slots], np.uint32))
    grid_table = bed.grid_table(fmt)

    def turn(address: int) -> list[Launch]:
        arguments = {
            **dict.fromkeys(PLAIN_GEMM, 0),
            **_record(fmt, n),
            "table": grid_table,
            "records": x,
            "offsets": count,
            "matrices": address,
            "y": y,
            "y_stride": n_rows,
            "n": n,
            "n_rows": n_rows,
        }
        kernel = gemm(tile, overlapped=bed.overlapped)
        grid = tile.grid(n_rows, n_slots, 0, 1)
        return [bed.launch(kernel, grid, arguments, tile.shared_bytes)]

    return Work(f"{n}x{n_rows}", n_slots, n_bytes, [turn(m[0]) for m in matrices])


def _chosen(n_copies: int, n_tokens: int, n_turns: int) -> NDArray[np.int64]:
    """Numbers of copies, [n_turns, n_slots]: the experts of a layer's tokens.

    One token's are others than those of the turns around it; those of several are drawn from
    `N_EXPERT`, or from as many as there are, each token's without regard to the others'.
    """
    rng = np.random.default_rng(1)
    if n_tokens == 1:
        n_rounds = -(-n_turns * N_USED // n_copies)
        order = np.concatenate([rng.permutation(n_copies) for _ in range(n_rounds)])
        return np.resize(order, (n_turns, N_USED))
    n_layers = max(1, n_copies // N_EXPERT)
    of_layer = min(n_copies, N_EXPERT)
    rows = []
    for turn in range(n_turns):
        drawn = [rng.permutation(of_layer)[:N_USED] for _ in range(n_tokens)]
        rows.append(turn % n_layers * of_layer + np.concatenate(drawn))
    return np.array(rows)


def _record(fmt: BlockFormat, n: int) -> dict[str, int]:
    names = ("scales_offset", "sums_offset", "record_bytes")
    return dict(zip(names, activation_layout(fmt.activation, n), strict=True))
