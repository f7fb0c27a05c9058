"""The GPU kernels `gemm_<format>` of floating-point weights: those of `ops.gpu.gemm`, fma by fma.

The same parameters; records are f32 rows, record_bytes apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.arithmetic import dot_rows
from ops.gpu.gemm import PARAMS
from ops.gpu.gemm_tile import most_tiles
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants import FORMATS, BlockFormat

FLOAT_FORMATS = ("F32", "F16", "BF16")

THREADS = 128
ROWS, TOKENS = THREADS // 32 * 4, 8
"""Rows and slots of a block."""

SUM_BYTES = 4 * (ROWS + 4)
SHARED = TOKENS * SUM_BYTES + 12 * TOKENS
"""Dynamic shared memory in bytes."""


def gemm_float_grid(
    n_rows: int, n_slots: int, n_groups: int = 0, n_columns: int = 1
) -> tuple[int, int, int]:
    """Blocks for up to `n_slots` slots in `n_groups` groups, or in a dense product."""
    return -(-n_rows // ROWS), most_tiles(TOKENS, n_slots, n_groups), n_columns


def gemm_float(fmt: BlockFormat, *, overlapped: bool = False) -> Kernel:
    """The kernel of a format of `FLOAT_FORMATS`."""
    defines: dict[str, str | int] = {
        "WEIGHT": f'"inc/gemm_weight_{fmt.name.lower()}.inc.ptx"',
        "WEIGHT_BYTES": fmt.block_bytes,
        "WEIGHT_32": 32 * fmt.block_bytes,
        "ROWS": ROWS,
        "ROWS_SHIFT": ROWS.bit_length() - 1,
        "TOKENS": TOKENS,
        "TOKENS_SHIFT": TOKENS.bit_length() - 1,
        "COLUMNS": TOKENS,
        "SLOTS_AT_ONCE": THREADS // ROWS,
        "SUM_BYTES": SUM_BYTES,
        "SLOTS": TOKENS * SUM_BYTES,
        "OUT_ROWS": TOKENS * SUM_BYTES + 8 * TOKENS,
        "PUT": '"inc/gemm_put_float.inc.ptx"',
        "JOIN": '"inc/gemm_join_1.inc.ptx"',
    }
    return Kernel(
        entry=f"gemm_{fmt.name.lower()}",
        source="gemm_float.ptx",
        defines=defines | launch_defines(THREADS, 3, overlapped),
        params=PARAMS,
        block=THREADS,
        reference=dot_rows,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format, overlapped."""
    for name in FLOAT_FORMATS:
        kernel = gemm_float(FORMATS[name], overlapped=True)
        yield kernel.entry, kernel
