"""The GPU kernel `norm`: residual, sum of expert outputs, RMS norm, activation records.

What `ops.cpu.norm` does, a block a row.  Rows of this step are numbered r = 0 ..; everything of a
row but x itself is indexed by r, x by tokens[r].  Each of these addresses may be 0, "not there":
count, tokens, delta, expert_out (then slots, weights and n_used are not read), slots, shared,
shared_weights, weight (then only x is updated), out_f32, q8_256, q8_32.

x               f32[*, x_stride]: the residual stream; its first n values are updated in place if
                there is a delta, an expert_out or a shared, and normalised
x_stride        values from a row of x to the next, a multiple of 4
n               values that are normalised, a multiple of 8 (of 32 or 256 for records), <= 8192
count           address of the u32 number of rows of this step, a block beyond it leaves; 0: every
                row of the grid, which saves a round trip to L2
tokens          i32[rows]: which row of x; 0: row r is x[r]
delta           f32[rows, n], added to x first
expert_out      f32[n_slots, n]
slots           i32[rows, n_used]: where in expert_out choice i of row r is; 0: r * n_used + i
weights         f32[rows, n_used]
shared          f32[rows, n]: one more term after the routed ones
shared_weights  f32[rows]: its weight; 0: one
weight          f32[n] of the norm
out_f32         f32 rows, each at a multiple of 64 bytes (`activation_layout` of kind f32)
q8_256, q8_32   u8[rows, record_bytes]: activation records of the normalised row
eps             is added to the mean of squares

The expert sum has the CPU's bits (one fma a term from zero, then added to x).  The sum of squares
has an order of its own, the same for every row of every launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.arithmetic import combine
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32

VALUES = 8
"""Values of a row that a thread takes."""

BLOCKS = (256, 512, 1024)
MAX_N = VALUES * BLOCKS[-1]

PARAMS = (
    ("x", "u64"),
    ("x_stride", "u32"),
    ("n", "u32"),
    ("count", "u64"),
    ("tokens", "u64"),
    ("delta", "u64"),
    ("expert_out", "u64"),
    ("slots", "u64"),
    ("weights", "u64"),
    ("n_used", "u32"),
    ("shared", "u64"),
    ("shared_weights", "u64"),
    ("weight", "u64"),
    ("out_f32", "u64"),
    ("q8_256", "u64"),
    ("q8_32", "u64"),
    ("eps", "f32"),
)


def norm(n: int, *, overlapped: bool = False) -> Kernel:
    """The kernel for rows of n values; grid (rows,).

    Raises:
        ValueError: n is not a multiple of 8, or above `MAX_N`.
    """
    if n % VALUES or not 0 < n <= MAX_N:
        raise ValueError(f"a norm of {n} values: not a multiple of {VALUES} up to {MAX_N}")
    return norm_of_block(next(b for b in BLOCKS if VALUES * b >= n), overlapped=overlapped)


def norm_of_block(block: int, *, overlapped: bool = False) -> Kernel:
    """The kernel for rows of up to 8 values a thread; `block` is one of `BLOCKS`."""
    return Kernel(
        entry="norm",
        source="norm.ptx",
        defines=launch_defines(block, 1, overlapped),
        params=PARAMS,
        block=block,
        reference=norm_reference,
    )


def norm_reference(
    x: F32,
    weight: F32,
    eps: float,
    delta: F32 | None = None,
    weights: F32 | None = None,
    outputs: F32 | None = None,
) -> tuple[F32, F32]:
    """(updated x, normalised x) of rows f32[rows, n].

    weights f32[rows, k] and outputs f32[rows, k, n]: the terms of the expert sum, the shared
    expert's last.  The mean of squares is taken in f64.
    """
    if delta is not None:
        x = x + delta
    if weights is not None and outputs is not None:
        x = combine(weights, outputs, x)
    mean = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True).astype(np.float32)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return x, (x * scale) * weight


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every block, alone and overlapped."""
    for block in BLOCKS:
        for overlapped in (False, True):
            name = f"norm ({block} threads{', overlapped' if overlapped else ''})"
            yield name, norm_of_block(block, overlapped=overlapped)
