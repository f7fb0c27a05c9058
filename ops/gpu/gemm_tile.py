"""What a block of a gemm kernel multiplies at once, and where it keeps it in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ops.arithmetic import n_partials
from ops.gpu.kernel import WARP, format_table
from ops.quants import BlockFormat
from ops.quants.block import ACTIVATION_GROUP

SUB_ELEMS = {
    "Q2_K": 16,
    "Q3_K": 16,
    "Q6_K": 16,
    "IQ1_M": 16,
    "IQ2_XS": 16,
    "IQ2_S": 16,
}
"""Weights under one integer sub-scale, where that is not 32."""


DIRECT_FORMATS = (
    *("Q4_K", "Q5_K", "Q6_K"),
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"),
)
"""Formats that a warp unpacks in its registers, as the tensor cores want them."""


@dataclass(frozen=True)
class GemmTile:
    """What a block of a format multiplies at once.

    tokens      slots of a block
    rows        rows of a block
    split       warps that share the same results and divide the units of a row
    columns     slots of a warp, which has 16 rows
    min_blocks  blocks of a multiprocessor that have to fit in its registers
    stages      buffers of a step: one that is multiplied, the others on their way
    """

    fmt: BlockFormat
    tokens: int
    rows: int
    split: int
    columns: int
    min_blocks: int = 2
    stages: int = 2

    @property
    def warps(self) -> int:
        return self.split * (self.rows // 16) * (self.tokens // self.columns)

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def step(self) -> int:
        """Values of a row that are multiplied between two barriers.

        A warp has one unit of 256 of it, or two smaller ones.
        """
        unit = self.fmt.unit_elems
        return self.split * unit * (1 if unit == 256 else 2)

    @property
    def n_residues(self) -> int:
        """Partial sums of a warp."""
        return n_partials(self.fmt) // self.split

    def grid(
        self, n_rows: int, n_slots: int, n_groups: int = 0, n_columns: int = 1
    ) -> tuple[int, int, int]:
        """Blocks for up to `n_slots` slots in `n_groups` groups, or in a dense product."""
        return -(-n_rows // self.rows), most_tiles(self.tokens, n_slots, n_groups), n_columns

    @property
    def shared_bytes(self) -> int:
        return Layout(self).n_bytes

    @property
    def label(self) -> str:
        buffers = ", two buffers" if self.fmt.unit_elems < 256 and self.stages == 2 else ""
        return f"{self.rows} rows, {self.tokens} slots{buffers}"

    def by_memory(self) -> Iterator[GemmTile]:
        """The tile, and where it is large what stands for it where shared memory is less."""
        yield self
        if self.stages == 3 and self.tokens == 64:
            yield replace(self, stages=2)


class Layout:
    """Where things are in a block's shared memory: offsets and pitches in bytes.

    Pitches are odd multiples of 16, so that 8 rows at the same column meet different banks, but for
    activations of small units, whose columns are turned (gemm_turn).
    """

    def __init__(self, tile: GemmTile) -> None:
        fmt, rows, tokens, step = tile.fmt, tile.rows, tile.tokens, tile.step
        self.units = step // fmt.unit_elems
        self.step_bytes = fmt.row_bytes(step)
        lead = 0 if fmt.block_bytes % 16 == 0 else 15
        self.pieces = -(-(self.step_bytes + lead) // 16)
        self.row_pitch = _odd(16 * self.pieces)
        self.pitch = step + 16
        large, mins = fmt.unit_elems == 256, fmt.has_mins
        n_scales = tokens * step // ACTIVATION_GROUP[fmt.activation]
        self.sums_pitch = step // 8 + 16
        self.unit_subs = 4 * 256 // SUB_ELEMS.get(fmt.name, 32)
        self.subs_pitch = self.units * self.unit_subs + 16
        self.mins_pitch = 16 * self.units + 16
        # the buffers
        self.x = rows * self.row_pitch
        self.x_pitch = self.pitch if large else step
        self.x_scales = self.x + tokens * self.x_pitch
        # eight lanes copy eight groups of a slot, whose scales are to be in different banks
        self.group_pitch = 4 * tokens if large else 4 * (tokens + 4)
        n_bytes = _up16(self.group_pitch * (n_scales // tokens))
        self.x_sums = self.x_scales + n_bytes
        sums = tokens * self.sums_pitch if large else n_bytes
        self.stage_bytes = self.x_sums + (sums if mins else 0)
        # what is unpacked in shared memory
        self.tile = tile.stages * self.stage_bytes
        self.slots = self.tile
        if fmt.name not in DIRECT_FORMATS:
            self._unpacked(fmt, rows)
        # what waits longest in the halving tree, slots, the grid
        self.top = self.slots
        self.top_pitch = 16 * tile.threads
        if tile.n_residues == 8:
            self.slots += self.top_pitch * tile.columns // 8
        self.out_rows = self.slots + 8 * tokens
        self.table = _up16(self.out_rows + 4 * tokens)
        self.n_bytes = self.table + _up16(format_table(fmt).nbytes)
        # in the place of the buffers, at the end
        self.sum_bytes = 4 * (rows + 4)

    def _unpacked(self, fmt: BlockFormat, rows: int) -> None:
        large, mins = fmt.unit_elems == 256, fmt.has_mins
        self.subs = self.tile + rows * self.pitch
        self.mins = self.subs + (rows * self.subs_pitch if large else 0)
        self.unit_scales = self.mins + (rows * self.mins_pitch if large and mins else 0)
        self.min_scales = self.unit_scales + 4 * rows * self.units
        self.slots = self.min_scales + (4 * rows * self.units if mins else 0)


def most_tiles(tokens: int, n_slots: int, n_groups: int) -> int:
    """Tiles of so many tokens that `n_slots` slots can take, however the groups share them."""
    tiles = -(-n_slots // tokens)
    return min(n_slots, tiles + n_groups) if n_groups else tiles


def _up16(n_bytes: int) -> int:
    return -(-n_bytes // 16) * 16


def _odd(n_bytes: int) -> int:
    """The next odd multiple of 16."""
    return n_bytes if n_bytes // 16 % 2 else n_bytes + 16
