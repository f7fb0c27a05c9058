"""Random blocks of every format, whose values have mean 0 and a chosen standard deviation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.quants import BlockFormat

SAMPLE = 2000
"""Blocks from which the spread of a format's values is measured."""

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def random_blocks(fmt: BlockFormat, n_blocks: int, std: float, rng: np.random.Generator) -> U8:
    """u8[n_blocks, block_bytes] whose values have mean 0 and this standard deviation.

    Raises: ValueError for block formats whose scale is neither a field `d` nor a field `e`.
    """
    if fmt.block_elems == 1:
        return _floats(fmt, n_blocks, std, rng)
    names = fmt.layout.names or ()
    blocks = rng.integers(0, 256, (n_blocks, fmt.block_bytes), np.uint8)
    if "d" in names:
        _set_scales(fmt, blocks, std)
    elif "e" in names:
        _set_exponents(fmt, blocks, std, rng)
    else:
        raise ValueError(f"no random {fmt.name}: its blocks have no plain scale")
    return blocks


def _floats(fmt: BlockFormat, n_values: int, std: float, rng: np.random.Generator) -> U8:
    values = rng.standard_normal(n_values, np.float32) * np.float32(std)
    if fmt.name == "BF16":
        raw = (values.view(np.uint32) >> 16).astype("<u2")
    else:
        raw = values.astype(fmt.layout)
    return raw.view(np.uint8).reshape(n_values, fmt.block_bytes)


def _set_scales(fmt: BlockFormat, blocks: U8, std: float) -> None:
    """One scale for all blocks, and one of the mins where the format has them."""
    fields = blocks.view(fmt.layout)[:, 0]
    mins = next((name for name in ("dmin", "m") if name in (fmt.layout.names or ())), None)

    def values(scale: float, low: float) -> F32:
        fields["d"] = scale
        if mins is not None:
            fields[mins] = low
        return fmt.dequantize(blocks[:SAMPLE])

    low = 0.0 if mins is None else -float(values(1, 0).mean() / values(0, 1).mean())
    unit = float(values(1, low).std())
    values(std / unit, low * std / unit)


def _set_exponents(fmt: BlockFormat, blocks: U8, std: float, rng: np.random.Generator) -> None:
    """Scales that are powers of two: two neighbouring ones, mixed to the variance."""
    fields = blocks.view(fmt.layout)[:, 0]
    fields["e"] = 128
    wanted = std / float(fmt.dequantize(blocks[:SAMPLE]).std())
    exponent = int(np.floor(np.log2(wanted)))
    share = (wanted**2 / 4.0**exponent - 1) / 3
    fields["e"] = 128 + exponent + (rng.random(len(blocks)) < share)
