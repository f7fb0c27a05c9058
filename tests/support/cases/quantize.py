"""quantize_q8: the records of ops.arithmetic.quantize_rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ops.arithmetic import activation_layout, quantize_rows
from ops.gpu.quantize import BLOCK_VALUES, quantize
from ops.quants.block import F32, ActivationKind
from tests.support.cases.case import Array, Case, Outcome
from tests.support.machines import Machine

SMALL: list[tuple[ActivationKind, int]] = [("q8_256", 1280), ("q8_32", 1056)]
"""A kind and a row of it that ends within a block, for 32-value groups also within a warp."""

LARGE: list[tuple[ActivationKind, int]] = [
    *((kind, n) for kind in ("q8_256", "q8_32") for n in (768, 1536, 2048, 4096, 5120, 17408)),
    ("q8_32", 2880),
]  # type: ignore[list-item]


def rows(n: int) -> F32:
    """Plain values, and groups that are zero, denormal, huge, tied, infinite or not a number."""
    x = np.random.default_rng(4).normal(size=(6, n)).astype(np.float32)
    x[0, :256] = 0
    x[0, 256:512] = -0.0
    x[1, :256] *= np.float32(1e-31)
    x[1, 256:512] = np.float32(1e-45)
    x[2, :256] *= np.float32(3e38) / np.abs(x[2, :256]).max()
    x[2, 256:512] = np.float32(1e-30)
    x[2, 512:768] = np.nextafter(np.float32(1e-30), np.float32(0))
    x[3] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, n)
    x[3, ::32] = 127
    x[4, 5], x[4, 300], x[4, 301] = np.inf, -np.inf, 2
    x[5, 40], x[5, 513] = np.nan, -np.nan
    return x


def run(kind: ActivationKind, n: int, overlapped: bool, machine: Machine) -> Outcome:
    """All records as one array of bytes, the NaNs among the scales made alike."""
    x = rows(n)
    scales_offset, sums_offset, record_bytes = activation_layout(kind, n)
    records = machine.place(np.zeros((len(x), record_bytes), np.uint8))
    machine.launch(
        quantize(kind, overlapped=overlapped),
        (-(-n // BLOCK_VALUES), len(x)),
        {
            "x": machine.place(x, writable=False),
            "records": records,
            "n": n,
            "scales_offset": scales_offset,
            "sums_offset": sums_offset,
            "record_bytes": record_bytes,
        },
    )
    result = machine.read(records, np.uint8, (len(x), record_bytes))
    return Outcome(alike(kind, n, result), alike(kind, n, quantize_rows(kind, x)))


def alike(kind: ActivationKind, n: int, records: Array) -> Array:
    """The records with one NaN for every NaN among their scales."""
    scales_offset, sums_offset, _ = activation_layout(kind, n)
    scales = np.ascontiguousarray(records[:, scales_offset:sums_offset]).view(np.float32)
    scales[np.isnan(scales)] = np.nan
    records = records.copy()
    records[:, scales_offset:sums_offset] = scales.view(np.uint8)
    return records


def cases() -> Iterator[Case]:
    for shapes, large in ((SMALL, False), (LARGE, True)):
        for kind, n in shapes:
            for overlapped in (False, True):
                kernel = quantize(kind, overlapped=overlapped)
                yield Case(f"{n}", kernel, partial(run, kind, n, overlapped), large)
