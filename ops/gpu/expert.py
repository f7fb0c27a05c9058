"""The GPU kernels of a routed expert, and the reference of both: gate and up, then down.

An expert is three matrices somewhere in memory; the kernels get their addresses from a table, and
an address of 0 says that the expert is not on this device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ops.arithmetic import activation_layout, dot_rows, quantize_rows, silu_mul
from ops.gpu.kernel import (
    CHUNK_ELEMS,
    Kernel,
    activation_defines,
    format_defines,
    launch_defines,
    table_copies_bytes,
)
from ops.quants import FORMATS, BlockFormat
from ops.quants.block import F32, U8

GPU_FORMATS = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ3_XXS",
    "IQ4_XS",
    "IQ4_NL",
    "Q4_0",
    "Q8_0",
)
"""Formats with a `dot` fragment."""

ADDRESSES = 4
"""u64 a slot in the table of addresses: gate, up, down and a spare."""

TEAMS = (32, 16, 8)
"""Lanes that may share two rows."""

_RECORD = (("scales_offset", "u32"), ("sums_offset", "u32"), ("record_bytes", "u32"))


@dataclass(frozen=True)
class RowLaunch:
    """How a kernel that multiplies pairs of rows is built and launched.

    team        lanes that share two rows, one of `TEAMS`
    block       threads of a block
    min_blocks  blocks of a multiprocessor that have to fit in its registers
    rounds      pairs of rows that a team multiplies in turn, the next one's weights under way
    overlapped  starts while its predecessor runs; see `launch_defines`

    The defaults were the best single choice on an H200; the best one differs by up to 15 % between
    formats and shapes.
    """

    team: int
    block: int = 256
    min_blocks: int = 3
    rounds: int = 2
    overlapped: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of rows that a block takes at once."""
        return self.block // self.team

    def defines(self, fmt: BlockFormat) -> dict[str, str | int]:
        return format_defines(fmt, self.team) | launch_defines(
            self.block, self.min_blocks, self.overlapped
        )

    def grid(self, n_pairs: int, n_slots: int) -> tuple[int, int]:
        """Blocks for the pairs of rows of every slot."""
        return -(-n_pairs // (self.pairs * self.rounds)), n_slots

    def shared_bytes(self, fmt: BlockFormat, n: int) -> int:
        """Dynamic shared memory for rows of n values."""
        piece = -(-min(fmt.row_bytes(n), fmt.row_bytes(CHUNK_ELEMS)) // 16) * 16 + 16
        record_bytes = activation_layout(fmt.activation, n)[2]
        return record_bytes + table_copies_bytes(fmt) + self.pairs * 4 * piece


def best_team(fmt: BlockFormat, n: int) -> int:
    """The team whose lanes idle least in rows of n values; the largest of several.

    On an H200 this took 24 % off down of 768 values and 11 % off that of 1536 (Q4_K).
    """
    lanes_per_unit = 4 if fmt.unit_elems == 256 else 2
    n_units = min(n, CHUNK_ELEMS) // fmt.unit_elems

    def used(team: int) -> float:
        at_once = team // lanes_per_unit
        return n_units / (-(-n_units // at_once) * at_once)

    return max(TEAMS, key=lambda team: (used(team), team))


def gate_up_reference(fmt: BlockFormat, gate: U8, up: U8, records: U8) -> F32:
    """Rows u8[n_rows, row_bytes] of two matrices x records -> h f32[n_tokens, n_rows]."""
    return silu_mul(dot_rows(fmt, gate, records), dot_rows(fmt, up, records))


def down_reference(fmt: BlockFormat, down: U8, h: F32) -> F32:
    """Rows u8[n_rows, row_bytes] x h f32[n_tokens, n] -> f32[n_tokens, n_rows]."""
    return dot_rows(fmt, down, quantize_rows(fmt.activation, h))


def expert_gate_up(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """Gate, up and their activation; grid `launch.grid(n_rows, ...)`.

    Raises:
        LookupError: the format has no fragment yet.
    """
    _check(fmt)
    return Kernel(
        entry=f"expert_gate_up_{fmt.name.lower()}",
        source="expert_gate_up.ptx",
        defines=launch.defines(fmt),
        params=(
            *((name, "u64") for name in ("records", "experts", "table", "h")),
            *((name, "u32") for name in ("n", "n_rows", "n_used")),
            *_RECORD,
        ),
        block=launch.block,
        reference=gate_up_reference,
    )


def expert_down(fmt: BlockFormat, launch: RowLaunch) -> Kernel:
    """Down, one output vector a slot; grid `launch.grid(ceil(n_rows / 2), ...)`.

    Raises:
        LookupError: the format has no fragment yet.
    """
    _check(fmt)
    return Kernel(
        entry=f"expert_down_{fmt.name.lower()}",
        source="expert_down.ptx",
        defines=launch.defines(fmt) | activation_defines(fmt.activation),
        params=(
            *((name, "u64") for name in ("h", "experts", "table", "y")),
            *((name, "u32") for name in ("n", "n_rows")),
            *_RECORD,
        ),
        block=launch.block,
        reference=down_reference,
    )


def variants() -> Iterator[tuple[str, Kernel]]:
    """Every format and team, alone and overlapped."""
    for name in GPU_FORMATS:
        for team in TEAMS:
            for overlapped in (False, True):
                launch = RowLaunch(team, overlapped=overlapped)
                variant = f"team {team}{', overlapped' if overlapped else ''}"
                for make in (expert_gate_up, expert_down):
                    kernel = make(FORMATS[name], launch)
                    yield f"{kernel.entry} ({variant})", kernel


def _check(fmt: BlockFormat) -> None:
    if fmt.name not in GPU_FORMATS:
        raise LookupError(f"no GPU kernels for {fmt.name} yet; there are {', '.join(GPU_FORMATS)}")
