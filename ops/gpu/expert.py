"""The GPU kernels of a routed expert, and the reference of both: gate and up, then down.

An expert is three matrices somewhere in memory; the kernels get their addresses from a table, and
an address of 0 says that the expert is not on this device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.arithmetic import dot_rows, quantize_rows
from ops.gpu.activate import ACTIVATIONS, SWIGLU, activated
from ops.gpu.kernel import Kernel, activation_defines, early_table_defines
from ops.gpu.row_launch import (
    BLOCK_FORMATS,
    TEAMS,
    RowLaunch,
    denser,
    down_launch,
    gate_up_launch,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

ADDRESSES = 4
"""u64 a slot in the table of addresses: gate, up, down and a spare."""

ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}
"""The kernel's number of an activation of `ops.gpu.activate`."""

_RECORD = (("scales_offset", "u32"), ("sums_offset", "u32"), ("record_bytes", "u32"))


def finish(y: F32, bias: F32 | None, scale: float) -> F32:
    """scale * y + bias, each step rounded."""
    y = y * np.float32(scale)
    return y if bias is None else y + bias


def gate_up_reference(
    fmt: BlockFormat,
    gate: U8,
    up: U8,
    records: U8,
    *,
    activation: str = SWIGLU,
    limit: float = 0.0,
    biases: tuple[F32 | None, F32 | None] = (None, None),
    scales: tuple[float, float] = (1.0, 1.0),
) -> F32:
    """Rows u8[n_rows, row_bytes] of two matrices x records -> h f32[n_tokens, n_rows]."""
    g = finish(dot_rows(fmt, gate, records), biases[0], scales[0])
    u = finish(dot_rows(fmt, up, records), biases[1], scales[1])
    return activated(activation, g, u, limit)


def down_reference(
    fmt: BlockFormat, down: U8, h: F32, *, bias: F32 | None = None, scale: float = 1.0
) -> F32:
    """Rows u8[n_rows, row_bytes] x h f32[n_tokens, n] -> f32[n_tokens, n_rows]."""
    return finish(dot_rows(fmt, down, quantize_rows(fmt.activation, h)), bias, scale)


def expert_gate_up(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """Gate, up and their activation; grid `launch.grid(n_rows, ...)`.

    Raises:
        LookupError: its weights are no blocks: no such experts are known.
    """
    _check(fmt)
    return Kernel(
        entry=f"expert_gate_up_{fmt.name.lower()}",
        source="expert_gate_up.ptx",
        defines=launch.defines(fmt) | early_table_defines(fmt),
        params=(
            *((name, "u64") for name in ("records", "experts", "table", "h", "choices")),
            *((name, "u64") for name in ("gate_scales", "gate_biases")),
            *((name, "u64") for name in ("up_scales", "up_biases")),
            *((name, "u32") for name in ("n", "n_rows", "n_used", "rounds", "activation")),
            ("limit", "f32"),
            *_RECORD,
        ),
        block=launch.block,
        reference=gate_up_reference,
    )


def expert_down(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """Down, one output vector a slot; grid `launch.grid(ceil(n_rows / 2), ...)`.

    Raises:
        LookupError: its weights are no blocks: no such experts are known.
    """
    _check(fmt)
    return Kernel(
        entry=f"expert_down_{fmt.name.lower()}",
        source="expert_down.ptx",
        defines=launch.defines(fmt) | activation_defines(fmt.activation),
        params=(
            *((name, "u64") for name in ("h", "experts", "table", "y")),
            *((name, "u64") for name in ("choices", "scales", "biases")),
            *((name, "u32") for name in ("n", "n_rows", "rounds")),
            *_RECORD,
        ),
        block=launch.block,
        reference=down_reference,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format and team, overlapped; one format alone as well."""
    for gate_up, down, fmt in launches():
        variant = f"team {down.team}{', overlapped' if down.overlapped else ''}"
        if down.block > RowLaunch.block:
            variant += f", {down.block} threads"
        elif down.min_blocks > down_launch(fmt, down.team).min_blocks:
            variant += f", {down.min_blocks} blocks"
        for kernel in (expert_gate_up(fmt, gate_up), expert_down(fmt, down)):
            yield f"{kernel.entry} ({variant})", kernel


def launches() -> Iterator[tuple[RowLaunch, RowLaunch, BlockFormat]]:
    """Those of gate and up and of down of the kernels that ship."""
    for team in TEAMS:
        for name in BLOCK_FORMATS:
            for overlapped in (True, False) if name == "Q4_K" else (True,):
                fmt = FORMATS[name]
                gate_up = gate_up_launch(fmt, team, overlapped=overlapped)
                down = down_launch(fmt, team, overlapped=overlapped)
                yield gate_up, down, fmt
                if denser(down, fmt) != down:
                    yield denser(gate_up, fmt), denser(down, fmt), fmt


def _check(fmt: BlockFormat) -> None:
    if fmt.name not in BLOCK_FORMATS:
        raise LookupError(f"no expert kernels for {fmt.name}; there are {', '.join(BLOCK_FORMATS)}")
