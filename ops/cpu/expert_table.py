"""What steps are told of experts' slots, and which copies fill them, compiled.

A cell is the number of an expert over all layers; a place is the addresses of its gate, up and down
matrix for kernels. See `runtime.experts.expert_table` and `runtime.experts.uploader`.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.job import args_record, kernel_njit
from ops.cpu.memory import array

EXPERT_TABLE = args_record(
    "expert table",
    first_rows="i8",
    slots="i8",
    offsets="i8",
    homes="i8",
    home_kinds="i8",
    deltas="i8",
    steps="i8",
    ended="i8",
    shown="i8",
    shown_stride="i8",
    n_expert="i8",
    most="i8",
    steps_mask="i8",
    slot_kind="i8",
    n_begun="i8",
    n_ended="i8",
)
"""first_rows  i64[n_layers]: the table's row of each layer's first expert
slots    u64 of each slot: its address;  offsets  i64[n_layers][3]: where matrices begin in one
homes    u64[n_cells][3]: the place of an expert that is in no slot, 0: kernels have none
home_kinds, slot_kind  i8 of each cell, and of those in slots: what serves an expert
deltas   u64[most][4]: become the table's row and the place of each expert that changes
steps    i64[ring][1 + most][2]: how many changes each step in flight has, cells and kinds
ended    i8[n_cells]: what served each expert in the last step that ended
shown    i8[n_layers][shown_stride]: what serves it in the last that began;  0: nobody asks
"""


@kernel_njit
def begin_table_step(table, changes, n):
    """A step begins with changes i64[n][2]: cells, and the slots that have them now, -1: none."""
    records = array(table, 1, EXPERT_TABLE)
    a = records[0]
    rows, deltas = array(changes, 2 * n, np.int64), array(a.deltas, 4 * n, np.int64)
    length = 2 * (1 + a.most)
    step = array(a.steps + 8 * length * (a.n_begun & a.steps_mask), length, np.int64)
    step[0] = n
    for i in range(n):
        cell, slot = rows[2 * i], rows[2 * i + 1]
        layer, expert = cell // a.n_expert, cell % a.n_expert
        deltas[4 * i] = array(a.first_rows + 8 * layer, 1, np.int64)[0] + expert
        place = array(a.homes + 24 * cell, 3, np.int64)
        kind = np.int64(array(a.home_kinds + cell, 1, np.int8)[0])
        base = 0
        if slot >= 0:
            place, kind = array(a.offsets + 24 * layer, 3, np.int64), a.slot_kind
            base = array(a.slots + 8 * slot, 1, np.int64)[0]
        for part in range(3):
            deltas[4 * i + 1 + part] = base + place[part]
        step[2 * i + 2], step[2 * i + 3] = cell, kind
        if a.shown != 0:
            array(a.shown + layer * a.shown_stride + expert, 1, np.int8)[0] = kind
    records[0].n_begun = a.n_begun + 1


@kernel_njit
def end_table_step(table):
    """The earliest step in flight has ended: its changes are in `ended`."""
    records = array(table, 1, EXPERT_TABLE)
    a = records[0]
    if a.n_ended == a.n_begun:
        return
    length = 2 * (1 + a.most)
    step = array(a.steps + 8 * length * (a.n_ended & a.steps_mask), length, np.int64)
    for i in range(step[0]):
        array(a.ended + step[2 * i + 2], 1, np.int8)[0] = step[2 * i + 3]
    records[0].n_ended = a.n_ended + 1


EXPERT_COPIES = args_record(
    "expert copies",
    direct="i8",
    parts="i8",
    slots="i8",
    targets="i8",
    sources="i8",
    sizes="i8",
    others="i8",
    kept="i8",
    n_expert="i8",
    n_copies="i8",
    n_bytes="i8",
    n_others="i8",
)
"""direct   u8 of each cell: whether each of its matrices is one copy
parts    i64[n_layers][3][4] of each matrix: offset in a slot, address of the first expert's, bytes
         to the next one's, bytes
slots    u64 of each slot: its address
targets, sources, sizes  u64: become n_copies copies, three for an expert, of n_bytes together
kept     i64[n][2]: become the uploads
others   i64[n_others]: become the numbers of those that are not direct; nothing is copied of them
"""


@kernel_njit
def write_copies(copies, uploads, n_uploads):
    """Those of i64[n_uploads][2]: cells, and the slots that they are to be copied to."""
    records = array(copies, 1, EXPERT_COPIES)
    a = records[0]
    rows, others = array(uploads, 2 * n_uploads, np.int64), array(a.others, n_uploads, np.int64)
    targets = array(a.targets, 3 * n_uploads, np.int64)
    sources = array(a.sources, 3 * n_uploads, np.int64)
    sizes = array(a.sizes, 3 * n_uploads, np.int64)
    kept, n, n_bytes, n_others = array(a.kept, 2 * n_uploads, np.int64), 0, 0, 0
    for i in range(n_uploads):
        cell, slot = rows[2 * i], rows[2 * i + 1]
        kept[2 * i], kept[2 * i + 1] = cell, slot
        if array(a.direct + cell, 1, np.uint8)[0] == 0:
            others[n_others] = i
            n_others += 1
            continue
        layer, expert = cell // a.n_expert, cell % a.n_expert
        parts = array(a.parts + 96 * layer, 12, np.int64)
        address = array(a.slots + 8 * slot, 1, np.int64)[0]
        for part in range(3):
            offset, first, stride, size = (
                parts[4 * part],
                parts[4 * part + 1],
                parts[4 * part + 2],
                parts[4 * part + 3],
            )
            targets[n], sources[n], sizes[n] = address + offset, first + expert * stride, size
            n += 1
            n_bytes += size
    records[0].n_copies, records[0].n_bytes, records[0].n_others = n, n_bytes, n_others
