"""The GPU kernel `delta_gates`: a delta net's gates and decays of a token by way of two matrices.

The second products, and of the decays what `ops.gpu.delta_net.delta_inputs` makes of them.  Grid
`delta_gates_grid`.

narrow        f32[2, n]: what gates and decays are made from
gate_matrix, decay_matrix   n_rows rows of the format, 16-byte aligned
table         the format's grid (`ops.gpu.kernel.format_table`), or anything
gates, decay  f32[n_rows]
decay_bias    f32[n_rows];  decay_rate f32[n_rows / dim]
has_floor, decay_floor   as `delta_inputs`
rounds        of the launch: pairs of rows of a team
scales_offset, sums_offset, record_bytes   `ops.arithmetic.activation_layout` of n
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.arithmetic import dot_rows, quantize_rows
from ops.gpu.delta_net import decay_reference
from ops.gpu.kernel import Kernel, activation_defines
from ops.gpu.row_launch import RowLaunch, best_team, down_launch
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

GATE_FORMATS = ("Q8_0", "Q5_0", "Q5_1")
"""Formats of most such matrices, whose rows are too short for larger blocks."""

WIDTH = 128
"""Values a row for which kernels ship: those of a head."""

PARAMS = (
    *((name, "u64") for name in ("narrow", "gate_matrix", "decay_matrix", "table")),
    *((name, "u64") for name in ("gates", "decay", "decay_bias", "decay_rate")),
    ("dim", "u32"),
    ("has_floor", "u32"),
    ("decay_floor", "f32"),
    *((name, "u32") for name in ("n", "n_rows", "rounds")),
    *((name, "u32") for name in ("scales_offset", "sums_offset", "record_bytes")),
)


def delta_gates(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """The kernel of a format of `GATE_FORMATS`.

    Raises:
        LookupError: it is none of them.
    """
    if fmt.name not in GATE_FORMATS:
        raise LookupError(f"no kernel of gates for {fmt.name}")
    return Kernel(
        entry=f"delta_gates_{fmt.name.lower()}",
        source="delta_gates.ptx",
        defines=launch.defines(fmt) | activation_defines(fmt.activation),
        params=PARAMS,
        block=launch.block,
        reference=delta_gates_reference,
    )


def delta_gates_grid(launch: RowLaunch, n_rows: int) -> tuple[int, int]:
    return launch.grid(-(-n_rows // 2), 2)


def delta_gates_reference(
    fmt: BlockFormat, gate: U8, decay: U8, narrow: F32, bias: F32, rate: F32, floor: float | None
) -> tuple[F32, F32]:
    """Rows u8[n_rows, row_bytes] of two matrices, narrow f32[2, n], bias f32[n_rows], rate
    f32[heads] -> (gates, decays f32[n_rows])."""
    records = quantize_rows(fmt.activation, narrow)
    gates, products = dot_rows(fmt, gate, records[:1])[0], dot_rows(fmt, decay, records[1:])[0]
    heads = (products + bias).reshape(1, len(rate), -1)
    return gates, decay_reference(heads, rate, floor).reshape(-1)


def launches() -> Iterator[tuple[RowLaunch, BlockFormat]]:
    """Those of the kernels that ship."""
    for name in GATE_FORMATS:
        for overlapped in (True, False) if name == "Q8_0" else (True,):
            fmt = FORMATS[name]
            yield down_launch(fmt, best_team(fmt, WIDTH), overlapped=overlapped), fmt


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format, overlapped; one format alone as well."""
    for launch, fmt in launches():
        kernel = delta_gates(fmt, launch)
        yield f"{kernel.entry}{' (overlapped)' if launch.overlapped else ''}", kernel
