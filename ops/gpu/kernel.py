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
from ops.arithmetic import n_partials
from ops.quants import BlockFormat
from ops.quants.block import ACTIVATION_GROUP, U8
from ops.quants.codebooks import GRIDS, grid

CHUNK_ELEMS = 2048
"""Weights of a row that travel to shared memory at once."""

WARP = 32


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
    small = fmt.unit_elems < 256
    suffix = "_mins" if fmt.has_mins else ""
    table_bytes = table_copies_bytes(fmt)
    repeat = "none" if team == WARP else "units"
    return {
        "BLOCK_ELEMS": fmt.block_elems,
        "BLOCK_BYTES": fmt.block_bytes,
        "CHUNK_BYTES": fmt.row_bytes(CHUNK_ELEMS),
        "TABLE_BYTES": table_bytes,
        "DOT": f'"inc/dot_{fmt.name.lower()}.inc.ptx"',
        "PASS": f'"inc/pass_{32 if small else 256}{suffix}.inc.ptx"',
        "TEAM": team,
        "ROTATE": f'"inc/rotate_{WARP // team}.inc.ptx"',
        "HALVE": f'"inc/halve_{n_partials(fmt)}_team_{team}.inc.ptx"',
        "LOAD_TABLE": f'"inc/table_{"lanes" if table_bytes else "none"}.inc.ptx"',
        **({} if small else {"REPEAT": f'"inc/repeat_{repeat}.inc.ptx"'}),
    }


def activation_defines(kind: str) -> dict[str, str | int]:
    """The macros that quantize to this kind of activation."""
    group = ACTIVATION_GROUP[kind]  # type: ignore[index]
    return {"GROUP": group, "GROUP_AMAX": f'"inc/amax_{group}.inc.ptx"'}


def format_table(fmt: BlockFormat) -> U8:
    """The format's grid as its kernels read it: an entry's magnitudes, one a byte; or empty."""
    if fmt.name not in GRIDS:
        return np.zeros(0, np.uint8)
    return grid(fmt.name).astype(np.int8).view(np.uint8).reshape(-1)


def table_copies_bytes(fmt: BlockFormat) -> int:
    """Shared memory for the grid: one copy a lane, each in its own bank."""
    return WARP * format_table(fmt).nbytes
