"""The GPU kernel `dense_down`: the down matrix of a dense block and the activation before it.

y[t, r] = down[r] . act(gate[t], up[t]), with the bits of `activate` and `linear`.  For few tokens:
each reads the weights anew.  Grid `launch.grid(ceil(n_rows / 2), n_tokens)`.

gate, up    f32 rows, 16-byte aligned, x_stride values apart
matrix      n_rows rows of the format, 16-byte aligned
table       the format's grid (`ops.gpu.kernel.format_table`), or anything
y           f32[n_tokens, n_rows]
count       address of the u32 number of tokens: blocks of later ones leave
rounds      of the launch: pairs of rows of a team
activation  index in `ops.gpu.activate.ACTIVATIONS`, with its limit
scales_offset, sums_offset, record_bytes   `ops.arithmetic.activation_layout` of n
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.arithmetic import dot_rows, quantize_rows
from ops.gpu.activate import activated
from ops.gpu.kernel import Kernel, activation_defines
from ops.gpu.row_launch import TEAMS, RowLaunch, down_launch
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

DENSE_FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
"""Formats of most dense blocks beside experts; the others go by way of `activate`."""

PARAMS = (
    ("gate", "u64"),
    ("up", "u64"),
    ("x_stride", "u32"),
    *((name, "u64") for name in ("matrix", "table", "y", "count")),
    *((name, "u32") for name in ("n", "n_rows", "rounds", "activation")),
    ("limit", "f32"),
    *((name, "u32") for name in ("scales_offset", "sums_offset", "record_bytes")),
)


def dense_down(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """The kernel of a format of `DENSE_FORMATS`.

    Raises:
        LookupError: it is none of them.
    """
    if fmt.name not in DENSE_FORMATS:
        raise LookupError(f"no kernel of dense blocks for {fmt.name}")
    return Kernel(
        entry=f"dense_down_{fmt.name.lower()}",
        source="dense_down.ptx",
        defines=launch.defines(fmt) | activation_defines(fmt.activation),
        params=PARAMS,
        block=launch.block,
        reference=dense_down_reference,
    )


def dense_down_reference(
    fmt: BlockFormat, down: U8, gate: F32, up: F32, activation: str, limit: float
) -> F32:
    """Rows u8[n_rows, row_bytes], gate and up f32[n_tokens, n] -> f32[n_tokens, n_rows]."""
    hidden = activated(activation, gate, up, limit)
    return dot_rows(fmt, down, quantize_rows(fmt.activation, hidden))


def launches() -> Iterator[tuple[RowLaunch, BlockFormat]]:
    """Those of the kernels that ship."""
    for name in DENSE_FORMATS:
        for team in TEAMS:
            fmt = FORMATS[name]
            yield down_launch(fmt, team, overlapped=True), fmt


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format and team, overlapped."""
    for launch, fmt in launches():
        kernel = dense_down(fmt, launch)
        yield f"{kernel.entry} (team {launch.team})", kernel
