"""How generated tokens enter gated streams, as launches: many blocks share a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ops.gpu import activate as activate_kernel
from ops.gpu.activate import activate
from ops.gpu.dense_down import DENSE_FORMATS, dense_down
from ops.gpu.gated_streams import (
    MAX_N,
    N_SUMS,
    gate_grid,
    gate_streams,
    gated_rows,
    gated_sum,
    rows_grid,
    sum_grid,
)
from ops.gpu.row_launch import Multiprocessors, best_team, down_launch, in_one_wave, is_float
from ops.gpu.streams import N_STREAM, RETURN_NOTHING
from runtime.engine.gpu.matrix_launches import (
    GEMM_ROWS,
    Output,
    Product,
    add_products,
    want_inputs,
)
from runtime.engine.gpu.plan_parts import DeviceRows, PlanParts, record_bytes, record_fields
from runtime.engine.gpu.row_launches import NOTHING_PENDING
from runtime.engine.step import StepKind
from runtime.models.streams import GatedStreams

FLOATS = 4
"""Rows of f32 values begin at multiples of so many: 16-byte loads."""

SILU_MUL = activate_kernel.ACTIVATIONS.index(activate_kernel.SWIGLU)


@dataclass(frozen=True)
class Entry:
    """A mix that is entered.

    norm     address of the norm's weights
    x        that of the streams
    outputs  the rows are those of the step's outputs
    """

    name: str
    streams: GatedStreams
    norm: int
    x: int
    outputs: bool


def enters_by_parts(parts: PlanParts, streams: GatedStreams) -> bool:
    """Whether `add_gated` takes it: generated tokens, a product `inject` of numbers, no other."""
    if parts.shape.kind is not StepKind.DECODE or parts.model.spec.n_embd > MAX_N:
        return False
    inject = streams.inject
    if is_float(parts.format_of(streams.down.weight)):
        return False
    if inject is None:
        return True
    plain = inject.bias is None and inject.scale is None
    return plain and parts.format_of(inject.weight).name == "F32"


def add_gated(
    parts: PlanParts,
    entry: Entry,
    flat: DeviceRows,
    out: DeviceRows,
    pending: Mapping[str, int],
    returns: Mapping[str, int],
) -> int:
    """Return the last block's result to the streams, and write the input of the next to `out`.

    flat     the normed streams of a token in a row
    returns  how the last result returns: `returning` and `returns` of `gate_streams`

    Returns the address of how the next result returns, f32[n_rows, 4].
    """
    streams, n = entry.streams, parts.model.spec.n_embd
    n_rows, count = _rows(parts, entry)
    want_inputs(parts, [streams.down], flat)
    normed = flat.want("f32")
    returned = _add_normed(parts, entry, flat, pending, returns)
    stride = -(-streams.down.n_out // FLOATS) * FLOATS
    low = parts.room.place(f"low {stride}", 4 * parts.n_tokens * stride)
    products, rows = [Product(streams.down)], Output(low, stride)
    add_products(parts, f"{entry.name}_streams_down", products, flat, rows, count, n_rows)
    gates = _add_gates(parts, entry, rows)
    parts.plan.add(
        f"{entry.name}_input",
        gated_sum(overlapped=parts.overlapped),
        sum_grid(n, n_rows),
        {
            "counts": count,
            "x": normed,
            "gates": gates,
            "out_f32": out.wanted("f32"),
            "q8_256": out.wanted("q8_256"),
            "q8_32": out.wanted("q8_32"),
            "x_stride": record_bytes("f32", N_STREAM * n) // 4,
            "gates_stride": N_STREAM * n,
            "n": n,
            "scale": 1.0 / N_STREAM,
        },
        overlapped=parts.overlapped,
    )
    return returned


def _rows(parts: PlanParts, entry: Entry) -> tuple[int, int]:
    """How many there may be, and the address of how many there are."""
    if entry.outputs:
        return parts.shape.n_outputs, parts.output_count
    return parts.n_tokens, parts.token_count


def _add_normed(
    parts: PlanParts,
    entry: Entry,
    out: DeviceRows,
    pending: Mapping[str, int],
    returns: Mapping[str, int],
) -> int:
    """The normed streams in `out`, those of its records divided by N_STREAM, which is exact."""
    n, (n_rows, count), streams = parts.model.spec.n_embd, _rows(parts, entry), entry.streams
    grid = gate_grid(n, n_rows)
    sums = parts.room.place("gated sums", 4 * parts.n_tokens * grid[0] * N_SUMS)
    place = parts.room.place("gated returns", 4 * parts.n_tokens * N_STREAM)
    inject = 0 if streams.inject is None else parts.weights.matrix(streams.inject.weight)
    common = {
        "x": entry.x,
        "n": n,
        "tokens": parts.control("output_tokens") if entry.outputs else 0,
        "weight": entry.norm,
        "sums": sums,
    }
    parts.plan.add(
        f"{entry.name}_streams_gate",
        gate_streams(overlapped=parts.overlapped),
        grid,
        {
            **NOTHING_PENDING,
            **pending,
            **common,
            "count": count,
            "returning": returns["returning"] if pending else RETURN_NOTHING,
            "returns": returns["returns"],
            "inject": inject,
        },
        overlapped=parts.overlapped,
    )
    parts.plan.add(
        f"{entry.name}_streams",
        gated_rows(overlapped=parts.overlapped),
        rows_grid(n, n_rows),
        {
            **common,
            "counts": count,
            "n_sums": grid[0],
            "returns": place if inject else 0,
            "out_f32": out.wanted("f32"),
            "q8_256": out.wanted("q8_256"),
            "q8_32": out.wanted("q8_32"),
            "record_factor": 1.0 / N_STREAM,
            "eps": parts.model.spec.eps,
        },
        overlapped=parts.overlapped,
    )
    return place


def _add_gates(parts: PlanParts, entry: Entry, low: Output) -> int:
    """Address of f32[n_rows, 4 n]: up(silu(low)), of few rows by one launch."""
    up, (n_rows, count), name = entry.streams.up, _rows(parts, entry), entry.name
    fmt, width = parts.format_of(up.weight), up.n_in
    gates = parts.room.place("stream gates", 4 * parts.n_tokens * up.n_out)
    is_plain = up.bias is None and up.scale is None
    if n_rows < GEMM_ROWS and fmt.name in DENSE_FORMATS and is_plain:
        n_pairs = -(-up.n_out // 2)
        gpu = Multiprocessors(parts.gpu.n_multiprocessors, parts.gpu.block_shared_bytes)
        launch = down_launch(fmt, best_team(fmt, width), overlapped=parts.overlapped)
        launch = in_one_wave(launch, fmt, width, n_rows * n_pairs, gpu)
        parts.plan.add(
            f"{name}_streams_up",
            dense_down(fmt, launch),
            launch.grid(n_pairs, n_rows),
            {
                "rounds": launch.rounds,
                **record_fields(fmt.activation, width),
                "gate": low.address,
                "up": parts.constants.place(np.ones((n_rows, low.stride), np.float32)),
                "x_stride": low.stride,
                "matrix": parts.weights.matrix(up.weight),
                "table": parts.grid_table(fmt),
                "y": gates,
                "count": count,
                "n": width,
                "n_rows": up.n_out,
                "activation": SILU_MUL,
                "limit": 0.0,
            },
            shared_bytes=launch.shared_bytes(fmt, width),
            overlapped=parts.overlapped,
        )
        return gates
    bent = DeviceRows(parts.room, f"bent {width}", parts.n_tokens, width)
    want_inputs(parts, [up], bent)
    parts.plan.add(
        f"{name}_streams_low",
        activate(fmt.activation, overlapped=parts.overlapped),
        (-(-width // activate_kernel.BLOCK_VALUES), n_rows),
        {
            "gate": low.address,
            "up": parts.constants.place(np.ones(width, np.float32)),
            "gate_stride": low.stride,
            "up_stride": 0,
            "n": width,
            "count": count,
            "per_token": 1,
            "first": 0,
            "activation": SILU_MUL,
            "limit": 0.0,
            "out": bent.want(fmt.activation),
        },
        overlapped=parts.overlapped,
    )
    rows = Output(gates, up.n_out)
    add_products(parts, f"{name}_streams_up", [Product(up)], bent, rows, count, n_rows)
    return gates
