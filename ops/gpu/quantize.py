"""The GPU kernels that quantize activations: `ops.arithmetic.quantize_rows` on the device."""

from __future__ import annotations

from collections.abc import Iterator

from ops.arithmetic import quantize_rows
from ops.gpu.kernel import Kernel, activation_defines, launch_defines
from ops.quants.block import ActivationKind

PARAMS = (
    ("x", "u64"),
    ("records", "u64"),
    ("n", "u32"),
    ("scales_offset", "u32"),
    ("sums_offset", "u32"),
    ("record_bytes", "u32"),
)
KINDS: tuple[ActivationKind, ...] = ("q8_256", "q8_32")
BLOCK = 128
BLOCK_VALUES = 8 * BLOCK
"""Values of a row that a block takes."""


def quantize(kind: ActivationKind, *, overlapped: bool = False) -> Kernel:
    """f32[n_tokens, n] -> activation records of this kind; grid (ceil(n / 1024), n_tokens)."""
    return Kernel(
        entry=f"quantize_{kind}",
        source="quantize_q8.ptx",
        defines=activation_defines(kind) | launch_defines(BLOCK, 8, overlapped),
        params=PARAMS,
        block=BLOCK,
        reference=quantize_rows,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Both kinds, alone and overlapped."""
    for kind in KINDS:
        for overlapped in (False, True):
            kernel = quantize(kind, overlapped=overlapped)
            yield f"{kernel.entry}{' (overlapped)' if overlapped else ''}", kernel
