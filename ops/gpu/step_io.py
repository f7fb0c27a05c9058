"""The GPU kernels `refresh` and `report`: what a step takes from the host and gives to it.

`refresh` is the first kernel of a step.  The host writes everything the step needs into one slot
of a ring of `RING` control blocks in mapped memory; block e mod `RING` belongs to epoch e.  The
layout inside a block is the executor's, fixed at capture; the kernel copies n_bytes of it to
`control`, at the same offsets, and applies the table's changes.  Grid (`refresh_blocks(...)`,).

epoch           address of a u32 in device memory: the number of this step, from 1; `report` adds 1
ring            mapped memory, 16-byte aligned: RING control blocks
stride          bytes from a block of the ring to the next, a multiple of 16
n_bytes         copied from the start of a block, a multiple of 16
control         device memory of n_bytes
deltas_offset   where in a block of the ring the changes are: u32 n, 12 bytes not read, then at
                most max_deltas of {u32 row, u32 not read, u64 gate, u64 up, u64 down}
max_deltas      room for changes, 0: none is read
table           u64[*, 4]: row gets {gate, up, down} and keeps its fourth word; rows of one step
                differ

`report` is the last.  It copies results to mapped memory, marks outputs whose logits are not
finite, adds 1 to the epoch, and last of all stores `done`.  Grid (`report_blocks`, 1 + outputs).

epoch           as above
count           address of the u32 number of outputs
logits          f32[outputs, stride]; 0: none is looked at (the grid then may be (blocks, 1))
n_vocab, stride values of a row, and from a row to the next, a multiple of 4
host_logits     f32[outputs, stride] in mapped memory; 0: the logits are only looked at
flags           u32[outputs] in mapped memory: epoch is stored where a logit is not finite
copies          u64[n_copies, 4] in device memory: {from, to, n_bytes, stride}, each 16-byte
n_copies        aligned and a multiple of 16 bytes: whatever else the host wants, such as choices;
                it gets to + (epoch mod `RING`) * stride
counter         address of a u32 in device memory, 0 between launches
done            address of a u32 in mapped memory: gets the epoch of this step, by a release of the
                whole system after everything else
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ops.gpu.kernel import Kernel, launch_defines
from ops.quants.block import F32, U8

RING = 4
"""Control blocks; a power of two, so that the epoch may wrap."""

DELTA_BYTES = 32
DELTAS_HEADER_BYTES = 16

REFRESH_BLOCK = 256
REPORT_BLOCK = 256
MAX_REPORT_BLOCKS = 24
"""Blocks that copy a row; the link is full with fewer."""

REFRESH_PARAMS = (
    ("epoch", "u64"),
    ("ring", "u64"),
    ("stride", "u32"),
    ("n_bytes", "u32"),
    ("control", "u64"),
    ("deltas_offset", "u32"),
    ("max_deltas", "u32"),
    ("table", "u64"),
)

REPORT_PARAMS = (
    ("epoch", "u64"),
    ("count", "u64"),
    ("logits", "u64"),
    ("n_vocab", "u32"),
    ("stride", "u32"),
    ("host_logits", "u64"),
    ("flags", "u64"),
    ("copies", "u64"),
    ("n_copies", "u32"),
    ("counter", "u64"),
    ("done", "u64"),
)


def refresh() -> Kernel:
    """The control block of this step."""
    return Kernel(
        entry="refresh",
        source="refresh.ptx",
        defines={"RING_MASK": RING - 1},
        params=REFRESH_PARAMS,
        block=REFRESH_BLOCK,
        reference=refresh_reference,
    )


def refresh_blocks(n_bytes: int, max_deltas: int) -> int:
    """The grid of `refresh`: 16 bytes a thread, then a delta a thread."""
    return -(-n_bytes // (16 * REFRESH_BLOCK)) + -(-max_deltas // REFRESH_BLOCK)


def report(*, overlapped: bool = False) -> Kernel:
    """The end of a step."""
    return Kernel(
        entry="report",
        source="report.ptx",
        defines={"RING_MASK": RING - 1, **launch_defines(REPORT_BLOCK, 1, overlapped)},
        params=REPORT_PARAMS,
        block=REPORT_BLOCK,
        reference=report_reference,
    )


def report_blocks(stride: int) -> int:
    """The grid's x of `report` for rows of `stride` values."""
    return min(MAX_REPORT_BLOCKS, -(-stride // (4 * REPORT_BLOCK)))


def refresh_reference(block: U8, n_bytes: int, deltas_offset: int, table: NDArray[np.uint64]) -> U8:
    """control u8[n_bytes] of a control block u8[stride]; `table` u64[*, 4] gets its changes."""
    (n,) = block[deltas_offset : deltas_offset + 4].view(np.uint32)
    first = deltas_offset + DELTAS_HEADER_BYTES
    words = block[first : first + DELTA_BYTES * int(n)].view(np.uint64).reshape(-1, 4)
    rows = (words[:, 0] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    table[rows, :3] = words[:, 1:]
    return block[:n_bytes].copy()


def report_reference(logits: F32) -> NDArray[np.bool_]:
    """Which rows of f32[outputs, n_vocab] are not finite."""
    bad: NDArray[np.bool_] = np.any(~np.isfinite(logits), axis=1)
    return bad


def variants() -> Iterator[tuple[str, Kernel]]:
    """refresh; report alone and overlapped."""
    yield "refresh", refresh()
    yield "report", report()
    yield "report (overlapped)", report(overlapped=True)
