"""Random weight rows of every format: finite, and with the corners a kernel can get wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.quants import FORMATS, BlockFormat

BLOCK_FORMATS = [name for name, fmt in FORMATS.items() if fmt.block_elems > 1]
FLOAT_FORMATS = ["F32", "F16", "BF16"]

F16_DENORMAL, F16_MAX = 0x0001, 0x7BFF
N_KINDS = 8
"""Of every eight blocks one each has: zero scales, all bits set, a denormal scale, the largest
scale, a negative scale; three are plain."""


def random_blocks(fmt: BlockFormat, n_blocks: int, seed: int) -> NDArray[np.uint8]:
    """u8[n_blocks, block_bytes]; every value of the blocks is finite."""
    rng = np.random.default_rng(seed)
    if fmt.block_elems == 1:
        return _random_floats(fmt, n_blocks, rng)
    blocks = rng.integers(0, 256, (n_blocks, fmt.block_bytes), np.uint8)
    kinds = rng.permutation(np.arange(n_blocks) % N_KINDS)
    blocks[kinds == 1] = 0xFF
    fields = blocks.view(fmt.layout)[:, 0]
    for name in fmt.layout.names or ():
        if fmt.layout[name] == np.dtype("<f2"):
            fields[name] = _random_scales(kinds, rng).view(np.float16)
    if fmt.name == "IQ1_M":
        halves = _random_scales(kinds, rng)[:, None] >> np.array([0, 4, 8, 12], np.uint16)
        fields["scales"] = fields["scales"] & 0x0FFF | halves << 12
    elif fmt.name == "MXFP4":
        fields["e"] = np.where(kinds < 4, kinds % 2, rng.integers(100, 141, n_blocks))
    return blocks


def random_rows(fmt: BlockFormat, n_rows: int, n_elems: int, seed: int) -> NDArray[np.uint8]:
    """u8[n_rows, row_bytes]."""
    n_blocks = n_rows * n_elems // fmt.block_elems
    return random_blocks(fmt, n_blocks, seed).reshape(n_rows, fmt.row_bytes(n_elems))


def _random_scales(kinds: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.uint16]:
    """The bits of one f16 scale a block."""
    plain = (rng.normal(size=kinds.shape) * 0.01).astype(np.float16)
    scales = np.where(kinds == 4, -np.abs(plain), plain).view(np.uint16)
    return np.select(
        [kinds == 0, kinds == 2, kinds == 3],
        [np.uint16(0), np.uint16(F16_DENORMAL), np.uint16(F16_MAX)],
        scales,
    ).astype(np.uint16)


def _random_floats(fmt: BlockFormat, n_blocks: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    values = rng.normal(size=(n_blocks, 1)).astype(np.float32)
    if fmt.name == "BF16":
        return np.ascontiguousarray(values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return values.astype(fmt.layout).view(np.uint8)
