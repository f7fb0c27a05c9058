"""A GPU kernel as data: its PTX text, the constants set in it, what it takes, what it must equal.

Nothing here knows a driver: a device packs the arguments once, keeps them, and launches.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ptx
from ops.arithmetic import FLOAT_PARTIALS, n_partials
from ops.quants import BlockFormat
from ops.quants.block import ACTIVATION_GROUP, U8
from ops.quants.codebooks import GRIDS, grid

CHUNK_ELEMS = 2048
"""Weights of a row that travel to shared memory at once."""

WARP = 32

PIECE_BYTES = 16
"""What an asynchronous copy moves; matrices begin at multiples of it."""

OWN_DOT = frozenset(
    (
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
        *("IQ4_NL", "MXFP4", "Q4_0", "Q8_0", "NVFP4"),
    )
)
"""Formats whose row product has a fragment of its own; the others unpack, then multiply."""

SLICES = {"Q6_K": "halves", "Q2_K": "quarters", "Q3_K": "quarters"}
"""Formats of 256-value units in which a lane's 64 are pieces of the same bytes, not neighbours."""

SWIZZLES = {"quarters": (96, 2)}
"""The q's address bits that others change, and how far these are above; else `PLAIN_SWIZZLE`."""
PLAIN_SWIZZLE = 48, 3

TABLE_COPIES = {"IQ3_XXS": "lanes", "IQ2_XXS": "pairs", "IQ3_S": "odd"}
"""Formats whose row products keep a copy of the grid for each lane or two, in banks of its own.

Larger grids would leave room for too few blocks: they have one copy.
"""

N_COPIES = {"lanes": WARP, "pairs": WARP // 2, "odd": WARP // 2, "plain": 1, "none": 0}
"""Shared memory of a grid, as a multiple of it, by the fragment that puts it there.

"odd" gives each lane a copy of half the size.
"""

NO_TABLE = '"inc/table_none.inc.ptx"'

SHARED_GRIDS = {"IQ1_M": "IQ1_S"}
"""Formats that use the grid of another one."""


@dataclass(frozen=True)
class Kernel:
    """One entry of a PTX text.

    entry      its name in the module
    source     the file in ptx/
    defines    macros of the text
    params     names and PTX types, in order: ("x", "u64")
    block      threads of a block
    reference  what it computes, in NumPy
    """

    entry: str
    source: str
    defines: Mapping[str, str | int]
    params: tuple[tuple[str, str], ...]
    block: int
    reference: Callable[..., Any] = field(repr=False)

    @cached_property
    def text(self) -> str:
        """The text an assembler gets."""
        defines: dict[str, Any] = {"ENTRY": self.entry, **self.defines}
        return ptx.expand(self.source, **defines)

    @property
    def recipe(self) -> str:
        """A hash of what `text` is made of, which costs far less than making it."""
        made_of = (ptx.sources_hash(), self.entry, self.source, *sorted(self.defines.items()))
        return hashlib.sha256(repr(made_of).encode()).hexdigest()

    @property
    def text_hash(self) -> str:
        """Of the text alone: what its assembled code is kept under."""
        return ptx.text_hash(self.text)

    @cached_property
    def proof_hash(self) -> str:
        """What the results of a run belong to: the text, its launch and what it has to equal."""
        counterpart = inspect.getsource(self.reference)
        whole = f"{self.text_hash} {self.block} {counterpart}"
        return hashlib.sha256(whole.encode()).hexdigest()

    def pack(self, **arguments: float) -> PackedArguments:
        """Arguments ready for a launch, by name; those of f32 parameters are rounded to it.

        Raises:
            TypeError: a name is missing or unknown.
        """
        names = [name for name, _ in self.params]
        if set(names) != set(arguments):
            raise TypeError(f"{self.entry} takes {', '.join(names)}; got {', '.join(arguments)}")
        values = [_bits(arguments[name], type_) for name, type_ in self.params]
        return PackedArguments(np.array(values, np.uint64))


class PackedArguments:
    """Arguments where a driver reads them: `address` is that of an array of pointers to values.

    A value narrower than eight bytes lies in the low bytes of its slot.
    """

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self.values = values
        steps = 8 * np.arange(len(values), dtype=np.uint64)
        self._pointers = np.uint64(values.ctypes.data) + steps

    @property
    def address(self) -> int:
        return self._pointers.ctypes.data


def _bits(value: float, type_: str) -> int:
    """The value as its parameter's bytes hold it."""
    return int(np.float32(value).view(np.uint32)) if type_ == "f32" else int(value)


def launch_defines(block: int, min_blocks: int, overlapped: bool) -> dict[str, str | int]:
    """The macros of how a kernel is launched.

    min_blocks blocks of a multiprocessor have to fit in its registers. An overlapped kernel starts
    while its predecessor in the stream still runs (compute capability 9.0 or newer, and a launch
    with programmatic stream serialization) and waits only where it needs that one's results.
    """
    return {
        "LAUNCH_BOUNDS": f".maxntid {block}, 1, 1 .minnctapersm {min_blocks}",
        "TARGET": "sm_90" if overlapped else "sm_80",
        "GRID_WAIT": '"inc/grid_wait.inc.ptx"' if overlapped else '"inc/grid_wait_none.inc.ptx"',
    }


def format_defines(fmt: BlockFormat, team: int) -> dict[str, str | int]:
    """The macros that make a row product one of this format, two rows to `team` lanes."""
    suffix = "_mins" if fmt.has_mins else ""
    defines = {
        **_product_defines(fmt, team),
        **stage_defines(fmt, team),
        "PASS": f'"inc/pass_{fmt.unit_elems}{suffix}.inc.ptx"',
    }
    if fmt.unit_elems == ACTIVATION_GROUP["q8_256"]:
        defines["LOAD_X"] = f'"inc/load_x_{SLICES.get(fmt.name, "256")}.inc.ptx"'
        defines["REPEAT"] = f'"inc/repeat_{"none" if team == WARP else "units"}.inc.ptx"'
    else:
        defines["UNITS_LOG"] = fmt.units_per_block.bit_length() - 1
    if fmt.name in OWN_DOT:
        return defines | {"DOT": f'"inc/dot_{fmt.name.lower()}.inc.ptx"'}
    groups = "groups" if fmt.unit_elems == ACTIVATION_GROUP["q8_256"] else "group"
    return defines | {"DOT": f'"inc/dot_{groups}{suffix}.inc.ptx"', "UNPACK": unpack_fragment(fmt)}


def paired_defines(fmt: BlockFormat) -> dict[str, str | int]:
    """What replaces macros of `format_defines` where a lane of 16 takes two units of a row at once.

    For formats of units of 32, two blocks of which are words, and rows of a multiple of 64 values.
    """
    return {
        "PASS": '"inc/pass_32_pairs.inc.ptx"',
        "HALVE": '"inc/halve_pairs_16.inc.ptx"',
        "DOT": f'"inc/dot_pair_{fmt.name.lower()}.inc.ptx"',
    }


def _product_defines(fmt: BlockFormat, team: int) -> dict[str, str | int]:
    swizzle, swizzle_shift = SWIZZLES.get(SLICES.get(fmt.name, ""), PLAIN_SWIZZLE)
    return {
        "TABLE_BYTES": table_copies_bytes(fmt),
        "TEAM_LOG": team.bit_length() - 1,
        "SWIZZLE": swizzle,
        "SWIZZLE_SHIFT": swizzle_shift,
        "ROTATE": f'"inc/rotate_{WARP // team}.inc.ptx"',
        "HALVE": f'"inc/halve_{n_partials(fmt)}_team_{team}.inc.ptx"',
        **_table_defines(fmt),
    }


def stage_defines(fmt: BlockFormat, team: int) -> dict[str, str | int]:
    """The macros that bring rows of this format to shared memory, one to `team` threads."""
    aligned = fmt.block_bytes % PIECE_BYTES == 0
    pieces = -(-(fmt.row_bytes(CHUNK_ELEMS) + (0 if aligned else PIECE_BYTES - 1)) // PIECE_BYTES)
    steps = -(-pieces // team)
    return {
        "BLOCK_LOG": fmt.block_elems.bit_length() - 1,
        "BLOCK_BYTES": fmt.block_bytes,
        "CHUNK_BYTES": fmt.row_bytes(CHUNK_ELEMS),
        "SLACK": 0 if aligned else PIECE_BYTES - 1,
        "TEAM": team,
        "STAGE_STEPS": f'"inc/stage_steps_{steps if steps <= 5 else "many"}.inc.ptx"',
    }


def float_defines(fmt: BlockFormat) -> dict[str, str | int]:
    """The macros that make a product with weights that are numbers one of this format."""
    size = fmt.block_bytes
    return {
        "ELEM_BYTES": size,
        "PIECE": 4 * size,
        "ROW_STEP": FLOAT_PARTIALS * size,
        "TEAM_STEP": 2 * FLOAT_PARTIALS * size,
        "STEP_4": f'"inc/step_4_{fmt.name.lower()}.inc.ptx"',
    }


def unpack_fragment(fmt: BlockFormat) -> str:
    """The fragment that makes codes and scales of 32 weights in shared memory."""
    return f'"inc/unpack_{fmt.name.lower()}.inc.ptx"'


def activation_defines(kind: str) -> dict[str, str | int]:
    """The macros that quantize to this kind of activation."""
    group = ACTIVATION_GROUP[kind]  # type: ignore[index]
    return {"SCALE_GROUP": group, "GROUP_AMAX": f'"inc/amax_{group}.inc.ptx"'}


def format_table(fmt: BlockFormat) -> U8:
    """The format's grid as its kernels read it: an entry's values, int8; or empty."""
    name = SHARED_GRIDS.get(fmt.name, fmt.name)
    if name not in GRIDS:
        return np.zeros(0, np.uint8)
    return grid(name).astype(np.int8).view(np.uint8).reshape(-1)


def table_copies_bytes(fmt: BlockFormat) -> int:
    """Shared memory for the grid of a row product: see `TABLE_COPIES`."""
    return N_COPIES[_table_kind(fmt)] * format_table(fmt).nbytes


def early_table_defines(fmt: BlockFormat) -> dict[str, str | int]:
    """The macros of `expert_gate_up` that copy a grid before the predecessor has ended.

    They replace some of `format_defines`. Grids without copies of their own come later.
    """
    kind = TABLE_COPIES.get(fmt.name)
    if kind is None:
        return {"BEGIN": NO_TABLE}
    return {
        "BEGIN": '"inc/table_early.inc.ptx"',
        "EARLY_TABLE": f'"inc/table_{kind}.inc.ptx"',
        "LOAD_TABLE": f'"inc/own_{"pairs" if kind == "pairs" else "lanes"}.inc.ptx"',
        "FILL_TABLE": NO_TABLE,
    }


def _table_defines(fmt: BlockFormat) -> dict[str, str | int]:
    """When a grid comes to shared memory: before the first weights are asked for, or then."""
    kind = _table_kind(fmt)
    place = "FILL_TABLE" if kind == "odd" else "LOAD_TABLE"
    return {"LOAD_TABLE": NO_TABLE, "FILL_TABLE": NO_TABLE, place: f'"inc/table_{kind}.inc.ptx"'}


def _table_kind(fmt: BlockFormat) -> str:
    one = "plain" if format_table(fmt).nbytes else "none"
    return TABLE_COPIES.get(fmt.name, one)
