"""How the kernels that multiply pairs of weight rows with one vector are built and launched.

`linear` and the expert kernels are these: two rows go to a team of lanes, see inc/row_pair.inc.ptx;
float rows are simpler, but their pairs and blocks count alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ops.arithmetic import FLOAT_PARTIALS, activation_layout
from ops.gpu.kernel import (
    CHUNK_ELEMS,
    TABLE_COPIES,
    WARP,
    float_defines,
    format_defines,
    launch_defines,
    paired_defines,
    table_copies_bytes,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import ACTIVATION_GROUP

FLOAT_FORMATS = ("F32", "F16", "BF16")
"""Formats of numbers; F64 is converted when a model is loaded."""

BLOCK_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.block_elems > 1)
"""Formats of blocks, each with a `dot` fragment."""

GPU_FORMATS = (*BLOCK_FORMATS, *FLOAT_FORMATS)
"""Formats that `linear` and `embed` take; experts are of block formats."""

TEAMS = (32, 16, 8)
"""Lanes that may share two rows of blocks; of float rows a warp does."""


FLOAT_BLOCKS = {"F32": 32, "F16": 64, "BF16": 64}
"""Threads of a block that multiplies float rows."""

FLOAT_BUFFERS = 4
"""Chunks of float rows, at most, that are under way at once."""


MANY_ROWS = 8192
"""From so many rows on a launch fills a large GPU with two rounds of pairs."""


ONE_ROUND = frozenset(("Q4_K", "Q5_K", "Q6_K", "Q8_0"))
"""Formats of most dense matrices: with fewer rows a pair a team, on more multiprocessors."""


FEW_ROWS, LONG_ROW_BUFFERS = 512, 5
"""Rows of those formats that take small blocks; the chunks of long ones under way at once."""

PAIRED = frozenset(("IQ4_NL",))
"""Formats that take more instructions than a GPU has while it reads them, unless in pairs."""

PAIRED_VALUES, PAIRED_TEAM = 64, 16
"""Rows are multiples of so many for that; lanes of a team."""

SMALL_BLOCK_TEAM, SMALL_BLOCK_WAVES = 16, 1.25
"""Lanes of a team, and how many blocks a launch may have, as a multiple of those that run at once:
when a small one ends, the next begins beside the others."""

DENSE_BLOCKS = 4
"""Of 256 threads, on a multiprocessor: every format's experts have registers enough for these with
teams of 32. With smaller ones Q4_K and Q5_K would spill some."""

TWO_BLOCK_ROWS = 2 * 132 * 2 * 2 * 16
"""That two blocks of 256 threads on each multiprocessor of an H200 take in two rounds."""

HALF_SHARED_BYTES = 113 << 10
"""Of shared memory that each of two blocks of an H200's multiprocessor may take."""

BLOCK_SHARED_BYTES = 1024
"""Of shared memory that a block takes besides its own."""


@dataclass(frozen=True)
class Multiprocessors:
    """How many a GPU has, and the bytes of shared memory of each."""

    count: int
    shared_bytes: int


@dataclass(frozen=True)
class RowLaunch:
    """How a kernel that multiplies pairs of rows is built and launched.

    team        lanes that share two rows, one of `TEAMS`; 32 for float formats
    block       threads of a block
    min_blocks  blocks of a multiprocessor that have to fit in its registers
    rounds      pairs of rows that a team multiplies in turn
    buffers     chunks of two rows that a team has under way
    overlapped  starts while its predecessor runs; see `launch_defines`
    paired      a lane takes two units at a time: see `paired_defines`; team 16, formats `PAIRED`
    eager       all buffers are filled before the predecessor ends, not the first alone (`linear`)

    `best_launch`, `gate_up_launch` and `down_launch` give what was best on an H200 among the other
    kernels of a layer; alone, a kernel's best launch is another one.
    """

    team: int
    block: int = 256
    min_blocks: int = 3
    rounds: int = 2
    overlapped: bool = False
    buffers: int = 2
    paired: bool = False
    eager: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of rows that a block takes at once."""
        return self.block // self.team

    def defines(self, fmt: BlockFormat) -> dict[str, str | int]:
        """The macros of a kernel that is told the rounds when it is launched."""
        how = launch_defines(self.block, self.min_blocks, self.overlapped)
        if is_float(fmt):
            return float_defines(fmt) | how
        how["NEXT_PAIR"] = '"inc/next_pair.inc.ptx"'
        ring = {"BUFFERS": self.buffers, "NEWER": self.buffers - 1}
        product = format_defines(fmt, self.team)
        if self.paired:
            product |= paired_defines(fmt)
            del product["ROTATE"], product["UNITS_LOG"]
        return product | how | ring

    def fixed_defines(self, fmt: BlockFormat) -> dict[str, str | int]:
        """The macros of a kernel that is made for these rounds."""
        fixed = self.defines(fmt) | {"ROUNDS": self.rounds}
        if is_float(fmt):
            return fixed
        if self.rounds == 1:
            fixed["NEXT_PAIR"] = '"inc/next_pair_none.inc.ptx"'
        fixed["EARLY"] = self.buffers if self.eager else 1
        fixed["MAKE_RECORD"] = f'"inc/record_wait{"_all" if self.eager else ""}.inc.ptx"'
        return fixed

    def blocks(self, n_rows: int) -> int:
        """Blocks for the pairs of a matrix's rows."""
        return -(-n_rows // (2 * self.pairs * self.rounds))

    def grid(self, n_pairs: int, n_slots: int) -> tuple[int, int]:
        """Blocks for the pairs of rows of every slot."""
        return -(-n_pairs // (self.pairs * self.rounds)), n_slots

    def shared_bytes(self, fmt: BlockFormat, n: int) -> int:
        """Dynamic shared memory for rows of n values."""
        if is_float(fmt):
            n_buffers = min(-(-n // CHUNK_ELEMS), FLOAT_BUFFERS)
            width = min(-(-n // FLOAT_PARTIALS) * FLOAT_PARTIALS, CHUNK_ELEMS)
            return n_buffers * width * (4 + 2 * self.pairs * fmt.block_bytes)
        chunk = min(fmt.row_bytes(n), fmt.row_bytes(CHUNK_ELEMS))
        piece = -(-chunk // 16) * 16 + 16
        record_bytes = activation_layout(fmt.activation, n)[2]
        team_bytes = 2 * self.buffers * piece + 8 * self.rounds
        return record_bytes + table_copies_bytes(fmt) + self.pairs * team_bytes


def best_launch(
    fmt: BlockFormat, n: int, *, n_rows: int = MANY_ROWS, overlapped: bool = False
) -> RowLaunch:
    """How `linear` multiplies n_rows rows of n values, all matrices of the launch together.

    Few rows go to as many multiprocessors as there are; matrices of numbers are mostly routers.
    """
    if is_float(fmt):
        return RowLaunch(
            WARP, FLOAT_BLOCKS[fmt.name], min_blocks=8, rounds=1, overlapped=overlapped
        )
    if fmt.name in PAIRED and n % PAIRED_VALUES == 0:
        return paired_launch(n_rows, overlapped=overlapped)
    if fmt.name in ONE_ROUND and n_rows <= FEW_ROWS:
        return few_rows_launch(n, overlapped=overlapped)
    rounds = 1 if n_rows < MANY_ROWS and fmt.name in ONE_ROUND else 2
    return RowLaunch(best_team(fmt, n), rounds=rounds, overlapped=overlapped)


def few_rows_launch(n: int, *, overlapped: bool = False) -> RowLaunch:
    """Of rows that small blocks bring to more multiprocessors; long ones are under way as a whole.

    On an H200 320 rows of 10240 Q8_0 values took 3.1 us, 5.3 in blocks of 256 threads.
    """
    is_long = n > 2 * CHUNK_ELEMS
    buffers = LONG_ROW_BUFFERS if is_long else 2
    return RowLaunch(WARP, 64, 12, 1, overlapped, buffers, eager=is_long)


def paired_launch(n_rows: int, *, overlapped: bool = False) -> RowLaunch:
    """Of n_rows rows in pairs of units: those of an H200's multiprocessors at once, if they fit."""
    rounds = 1 if n_rows < MANY_ROWS else 2
    block, min_blocks = (256, 2) if MANY_ROWS <= n_rows <= TWO_BLOCK_ROWS else (128, 4)
    return RowLaunch(PAIRED_TEAM, block, min_blocks, rounds, overlapped, paired=True)


def gate_up_launch(fmt: BlockFormat, team: int, *, overlapped: bool = False) -> RowLaunch:
    """How `expert_gate_up` is launched, but for its rounds: see `expert_launch`.

    Formats that take many registers have small blocks with teams of 16: on an H200 10 slots of
    640 rows of 2560 took 9.6 us, 12.3 with teams of 32 (IQ4_XS). Where blocks have copies of a grid
    they are not smaller, and two: 10.8 us, 11.1 with a quarter of the copies in small ones (IQ3_S).
    """
    if fmt.name in TABLE_COPIES and team == SMALL_BLOCK_TEAM:
        return RowLaunch(team, min_blocks=2, overlapped=overlapped)
    if _is_wide(fmt) and team == SMALL_BLOCK_TEAM:
        return RowLaunch(team, 128, min_blocks=6, overlapped=overlapped)
    return RowLaunch(team, min_blocks=3 if _is_wide(fmt) else 4, overlapped=overlapped)


def down_launch(fmt: BlockFormat, team: int, *, overlapped: bool = False) -> RowLaunch:
    """How `expert_down` is launched, but for its rounds: see `expert_launch`."""
    return RowLaunch(team, min_blocks=2 if _is_wide(fmt) else 4, overlapped=overlapped)


def in_one_wave(
    launch: RowLaunch, fmt: BlockFormat, n: int, n_pairs: int, gpu: Multiprocessors
) -> RowLaunch:
    """The launch with as few rounds as let the blocks of all slots run at once.

    n        values a row
    n_pairs  of all slots together

    A block begins by waiting: for where its weights are, for its record, for the first of its
    weights. On an H200 64 slots of 2048x768 Q4_K took 44 us in one wave, 59 in ten.
    """
    resident = max(1, min(launch.min_blocks, _fitting(launch, fmt, n, gpu)))
    at_once = resident * gpu.count * launch.pairs
    if launch.block < RowLaunch.block:
        at_once = int(at_once * SMALL_BLOCK_WAVES)
    return replace(launch, rounds=max(1, -(-n_pairs // at_once)))


def expert_launch(
    launch: RowLaunch, fmt: BlockFormat, n: int, n_pairs: int, gpu: Multiprocessors
) -> RowLaunch:
    """`in_one_wave` of gate and up or of down, by denser blocks where these need so few rounds that
    fewer teams idle in the last one, or that it is half as many; those that share copies of a grid
    wherever they need fewer.

    On an H200 both of 8 experts of 4096x2048 took 37.2 us with 3 blocks and 6 rounds, then 2 and 8,
    32.3 with 4 and 4 each (Q4_K). Gate and up of 2048x768 take two rounds either way: 5.4 us with
    3 blocks, 6.0 with 4 (Q2_K); 8.1 with 3, 8.8 with 2 of 512 threads (IQ3_XXS). Of 64 slots they
    take 16 rounds and 52.8 us, or 12 and 49.0.
    """
    usual, dense = in_one_wave(launch, fmt, n, n_pairs, gpu), denser(launch, fmt)
    usual_teams, dense_teams = (_teams_at_once(one, fmt, n, gpu) for one in (usual, dense))
    if dense_teams <= usual_teams:
        return usual
    dense = in_one_wave(dense, fmt, n, n_pairs, gpu)
    if dense.block > usual.block:
        return dense if dense.rounds < usual.rounds else usual
    fewer_idle = dense.rounds * dense_teams < usual.rounds * usual_teams
    return dense if fewer_idle or 2 * dense.rounds <= usual.rounds else usual


def denser(launch: RowLaunch, fmt: BlockFormat) -> RowLaunch:
    """The launch with `DENSE_BLOCKS`, or half as many of twice the threads where these share copies
    of a grid; the same if it has as many or smaller teams.

    Shared memory would hold three of such blocks of 256 threads on an H200, and one, of either
    size, where a multiprocessor has 100 KB.
    """
    if launch.team < WARP or launch.min_blocks >= DENSE_BLOCKS:
        return launch
    if fmt.name in TABLE_COPIES:
        return replace(launch, block=2 * launch.block, min_blocks=DENSE_BLOCKS // 2)
    return replace(launch, min_blocks=DENSE_BLOCKS)


def _teams_at_once(launch: RowLaunch, fmt: BlockFormat, n: int, gpu: Multiprocessors) -> int:
    """Of a multiprocessor."""
    return min(launch.min_blocks, _fitting(launch, fmt, n, gpu)) * launch.pairs


def _fitting(launch: RowLaunch, fmt: BlockFormat, n: int, gpu: Multiprocessors) -> int:
    """Blocks for which a multiprocessor has shared memory."""
    return gpu.shared_bytes // (launch.shared_bytes(fmt, n) + BLOCK_SHARED_BYTES)


def _is_wide(fmt: BlockFormat) -> bool:
    """Whether its products take many registers: 4 lanes multiply a unit of 256 weights."""
    return fmt.unit_elems == ACTIVATION_GROUP["q8_256"]


def is_float(fmt: BlockFormat) -> bool:
    """Whether its weights are numbers, not blocks."""
    return fmt.activation == "f32"


def best_team(fmt: BlockFormat, n: int) -> int:
    """The team whose lanes idle least in rows of n values; the largest of several.

    On an H200 this took 24 % off down of 768 values. But a block has more teams if they are small,
    each with its buffers: where two blocks would not fit a multiprocessor, a larger team is better
    (down of 1536 values, Q6_K: 12.6 us with teams of 16, 18.3 with teams of 8). The second chunk of
    a row counts if it is the last one: 248320 rows of 2560 Q6_K values took 135 us with teams of
    16, 143 with teams of 32.
    """
    lanes_per_unit = 4 if fmt.unit_elems == 256 else 2
    chunks = [min(n, CHUNK_ELEMS)]
    if chunks[0] < n < 2 * CHUNK_ELEMS:
        chunks.append(n - chunks[0])
    units = [chunk // fmt.unit_elems for chunk in chunks]

    def used(team: int) -> float:
        at_once = team // lanes_per_unit
        return sum(units) / sum(-(-n_units // at_once) * at_once for n_units in units)

    fitting = [t for t in TEAMS if RowLaunch(t).shared_bytes(fmt, n) <= HALF_SHARED_BYTES]
    return max(fitting or TEAMS[:1], key=lambda team: (used(team), team))
