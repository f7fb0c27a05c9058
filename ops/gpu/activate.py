"""The GPU kernel `activate`: gate and up rows -> hidden rows as the down product wants them.

For the products of whole matrices (`gemm`), whose gate and up rows lie in memory; the experts' own
kernel does this itself.  Grid (ceil(n / 1024), rows).

gate, up        f32[rows, stride], 16-byte aligned: both may be halves of one array
gate_stride     values from a row to the next, multiples of 4
up_stride
n               values of a row, a multiple of 8 and of the activation's group
count           address of the u32 number of tokens: rows at or above count * per_token leave; 0:
                all rows of the grid
per_token       rows a token has: n_used for experts, else 1
activation      index in `ACTIVATIONS`
limit           of the clamped activations
out             u8[rows, record_bytes]: records of the kind (of kind f32: rows at multiples of 64
                bytes)
first           address of the u32 number of the first row: those before it leave; 0: none does
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ops.arithmetic import exp, quantize_rows, silu_mul
from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32, U8, ActivationKind

SWIGLU, SWIGLU_CLAMPED, SWIGLU_OAI = "swiglu", "swiglu_clamped", "swiglu_oai"
ACTIVATIONS = (SWIGLU, SWIGLU_CLAMPED, SWIGLU_OAI)
OAI_ALPHA = np.float32(1.702)

KINDS: tuple[ActivationKind, ...] = ("q8_256", "q8_32", "f32")

PARAMS = (
    ("gate", "u64"),
    ("up", "u64"),
    ("gate_stride", "u32"),
    ("up_stride", "u32"),
    ("n", "u32"),
    ("count", "u64"),
    ("per_token", "u32"),
    ("activation", "u32"),
    ("limit", "f32"),
    ("out", "u64"),
    ("first", "u64"),
)
BLOCK = 128
BLOCK_VALUES = 8 * BLOCK
"""Values of a row that a block takes."""


def activate(kind: ActivationKind, *, overlapped: bool = False) -> Kernel:
    """act(gate, up) as records of `kind`; grid (ceil(n / 1024), rows)."""
    return Kernel(
        entry=f"activate_{kind}",
        source="activate.ptx",
        defines={
            "STORE_ROW": f'"inc/store_row_{kind}.inc.ptx"',
            **launch_defines(BLOCK, 1, overlapped),
        },
        params=PARAMS,
        block=BLOCK,
        reference=activate_reference,
    )


def activate_reference(
    kind: ActivationKind, activation: str, gate: F32, up: F32, limit: float
) -> U8:
    """Records u8[rows, record_bytes] of f32[rows, n]."""
    return quantize_rows(kind, activated(activation, gate, up, limit))


def activated(activation: str, gate: F32, up: F32, limit: float) -> F32:
    """The hidden values; a NaN passes every clamp."""
    if activation != SWIGLU:
        top = np.float32(limit)
        gate = np.where(gate > top, top, gate)
        up = np.where(up > top, top, up)
        up = np.where(up < -top, -top, up)
    if activation != SWIGLU_OAI:
        return silu_mul(gate, up)
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = np.float32(1) / (np.float32(1) + exp(-(OAI_ALPHA * gate)))
        hidden: F32 = (gate * sigmoid) * (up + np.float32(1))
    return hidden


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every kind, alone and overlapped."""
    for kind in KINDS:
        for overlapped in (False, True):
            kernel = activate(kind, overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
