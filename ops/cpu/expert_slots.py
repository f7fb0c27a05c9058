"""Which expert is in which slot, and what changes with a step: the cache's bookkeeping, compiled.

`runtime.experts.cache` says what it is for; each function is one call for a whole step, made by
the thread that decides. An expert is named by its cell, its number over all layers. Rings have a
power of two of rows, and room for all that can be in them.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.expert_table import begin_table_step, end_table_step, write_copies
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.memory import array

SLOTS = args_record(
    "expert slots",
    slots="i8",
    coming="i8",
    classes="i8",
    free="i8",
    n_free="i8",
    changes="i8",
    waiting="i8",
    given="i8",
    rows="i8",
    table="i8",
    copies="i8",
    n_slots="i8",
    changes_mask="i8",
    waiting_mask="i8",
    n_given="i8",
    n_rows="i8",
    most="i8",
    n_changed="i8",
    n_seen="i8",
    n_waiting="i8",
    n_started="i8",
    n_unseen="i8",
    n_loading="i8",
    n_begun="i8",
    n_ended="i8",
    error="i8",
)
"""slots    i32 of each cell, -1: none;  coming  u8: a slot waits for it;  classes  i32: its slots'
free     i64[n_classes][n_slots], n_free i64[n_classes]: slots of each class that nobody has
changes  i64[ring][2] cell, slot or -1: n_changed so far, of which steps have seen n_seen; MOVED:
         where it is while it is in no slot has changed
waiting  i64[ring][3] cell, slot, last step that may read the slot or -1, which is not known yet:
         n_waiting so far, of which n_started; from n_unseen on its change was not seen
given, rows  i64[n_given][2], which go in, and i64[at least most][2], n_rows of which come out
table, copies  0, or what follows: the records of a table and of copies, see `expert_table`
error    0, or why a row was refused, as `WRONG` has it; rows from that one on change nothing
"""

MOVED = -2

WRONG = (
    "",
    "has a slot already",
    "finds no free slot left",
    "cannot take the slot of another size, or of none",
)


@kernel_njit
def change(records, cell, slot):
    """Another change, the last one."""
    a = records[0]
    at = a.n_changed & a.changes_mask
    row = array(a.changes + 16 * at, 2, np.int64)
    row[0], row[1] = cell, slot
    records[0].n_changed = a.n_changed + 1


@kernel_njit
def refusal(a, cell, victim):
    """Which of `WRONG` it is to give the cell the victim's slot; 0: nothing is."""
    slots, coming = array(a.slots + 4 * cell, 1, np.int32), array(a.coming + cell, 1, np.uint8)
    kind = array(a.classes + 4 * cell, 1, np.int32)[0]
    if slots[0] >= 0 or coming[0] != 0:
        return 1
    if victim < 0:
        return 2 if array(a.n_free + 8 * kind, 1, np.int64)[0] == 0 else 0
    other = array(a.classes + 4 * victim, 1, np.int32)[0]
    return 3 if array(a.slots + 4 * victim, 1, np.int32)[0] < 0 or other != kind else 0


@kernel_njit
def replace_experts(records):
    """Give each given row's expert the slot of the other one, which leaves; -1: a free one."""
    a = records[0]
    given = array(a.given, 2 * a.n_given, np.int64)
    for i in range(a.n_given):
        cell, victim = given[2 * i], given[2 * i + 1]
        records[0].error = refusal(a, cell, victim)
        if records[0].error != 0:
            break
        waiting = array(a.waiting + 24 * (records[0].n_waiting & a.waiting_mask), 3, np.int64)
        if victim < 0:
            kind = array(a.classes + 4 * cell, 1, np.int32)[0]
            n_free = array(a.n_free + 8 * kind, 1, np.int64)
            n_free[0] -= 1
            free = array(a.free + 8 * (kind * a.n_slots + n_free[0]), 1, np.int64)
            waiting[0], waiting[1], waiting[2] = cell, free[0], 0
        else:
            slot = array(a.slots + 4 * victim, 1, np.int32)
            waiting[0], waiting[1], waiting[2] = cell, slot[0], -1
            slot[0] = -1
            change(records, victim, -1)
        records[0].n_waiting += 1
        array(a.coming + cell, 1, np.uint8)[0] = 1


@kernel_njit
def start_uploads(records):
    """Up to `most` experts whose slots nothing reads any more come out, each with its slot."""
    a = records[0]
    rows, n = array(a.rows, 2 * a.most, np.int64), 0
    while n < a.most and a.n_started + n < a.n_waiting:
        first = array(a.waiting + 24 * ((a.n_started + n) & a.waiting_mask), 3, np.int64)
        if first[2] < 0 or a.n_ended < first[2]:
            break
        rows[2 * n], rows[2 * n + 1] = first[0], first[1]
        n += 1
    n_started = a.n_started + n
    records[0].n_rows, records[0].n_started = n, n_started
    records[0].n_unseen = max(a.n_unseen, n_started)
    records[0].n_loading = a.n_loading + n


@job_kernel
def swap_experts(args: int, chunk: int, worker: int) -> None:
    """`replace_experts`, then `start_uploads`, and their copies."""
    records = array(args, 1, SLOTS)
    replace_experts(records)
    start_uploads(records)
    if records[0].copies != 0:
        write_copies(records[0].copies, records[0].rows, records[0].n_rows)


@kernel_njit
def end_uploads(records):
    """Each given row's expert is in its slot."""
    a = records[0]
    given = array(a.given, 2 * a.n_given, np.int64)
    for i in range(a.n_given):
        cell, slot = given[2 * i], given[2 * i + 1]
        array(a.coming + cell, 1, np.uint8)[0] = 0
        array(a.slots + 4 * cell, 1, np.int32)[0] = slot
        change(records, cell, slot)
    records[0].n_loading = a.n_loading - a.n_given


@kernel_njit
def take_changes(records):
    """A step begins, and sees up to `most` changes first: they come out."""
    a = records[0]
    rows, n, seen, unseen = array(a.rows, 2 * a.most, np.int64), 0, a.n_seen, a.n_unseen
    while n < a.most and seen < a.n_changed:
        row = array(a.changes + 16 * (seen & a.changes_mask), 2, np.int64)
        seen += 1
        if row[1] == MOVED and array(a.slots + 4 * row[0], 1, np.int32)[0] >= 0:
            continue
        rows[2 * n], rows[2 * n + 1] = row[0], max(row[1], -1)
        n += 1
        if row[1] == -1:  # in the order of the uploads that are to have the slots
            waiting = array(a.waiting, 3 * (a.waiting_mask + 1), np.int64)
            while waiting[3 * (unseen & a.waiting_mask) + 2] >= 0:
                unseen += 1
            waiting[3 * (unseen & a.waiting_mask) + 2] = a.n_begun
            unseen += 1
    records[0].n_rows, records[0].n_seen, records[0].n_unseen = n, seen, unseen
    records[0].n_begun = a.n_begun + 1


@job_kernel
def begin_step(args: int, chunk: int, worker: int) -> None:
    """`end_uploads`, then `take_changes`, and the table's."""
    records = array(args, 1, SLOTS)
    end_uploads(records)
    take_changes(records)
    if records[0].table != 0:
        begin_table_step(records[0].table, records[0].rows, records[0].n_rows)


@job_kernel
def end_step(args: int, chunk: int, worker: int) -> None:
    """The earliest step in flight has ended, for the table too."""
    records = array(args, 1, SLOTS)
    records[0].n_ended += 1
    if records[0].table != 0:
        end_table_step(records[0].table)
