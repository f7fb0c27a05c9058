"""Rows of an n-gram table for the tokens of a GPU's step, as the file has them.

`gather_rows` waits until the step before has ended, so that the tokens which that one chose are
known, finds the rows (`runtime.models.ngram_memory` has the formula) and copies them to memory
that the GPU sees; a chunk is TOKENS_A_CHUNK tokens. `show_rows`, behind the gathering of all
tables, tells the GPU, which waits for them in `ops.gpu.take_rows`.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.cycles import YIELD_AFTER, YIELD_EVERY, cycle_counter
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.memory import (
    array,
    atomic_load,
    atomic_store,
    call_i64,
    load_i32,
    load_i64,
    pause,
    prefetch,
    store_i64,
)
from ops.cpu.posts import ABORT, BEAT_PAUSES, EPOCH, HALF, U32, beat
from ops.gathering import READY

GATHER = args_record(
    "gather",
    exchange="i8",
    done="i8",
    step="i8",
    sched_yield="i8",
    usleep="i8",
    pace="i8",
    madvise="i8",
    advice="i8",
    page_bytes="i8",
    contexts="i8",
    width="i8",
    n_tokens="i8",
    chosen="i8",
    chosen_stride="i8",
    ring_mask="i8",
    table="i8",
    row_bytes="i8",
    multipliers="i8",
    sizes="i8",
    offsets="i8",
    n_heads="i8",
    n_gram="i8",
    end_token="i8",
    places="i8",
    out="i8",
    out_stride="i8",
    token_bytes="i8",
)
"""exchange     memory as in `ops.gathering`, whose heartbeat is where an exchange has it
done, step, sched_yield   as in `ops.cpu.serve.SERVE`
usleep       address of the C function
pace         i64[2]: cycles that the last wait took, and a nap in it; zero at first
madvise      address of the C function; 0: pages are not asked for with `advice` before
contexts     i32[n_tokens, width]: each token and those before it, the nearest first; -1: there is
             none; the token itself may be -1 - row, the one that output `row` of the step before
             has chosen
n_tokens     address of their number
chosen       i32 of each step, chosen_stride bytes apart, those of step e in place e & ring_mask
table        its rows, row_bytes each
multipliers  u64[n_gram]
sizes        u64[n_heads], offsets i64[n_heads]
places       i64[n_tokens, n_heads], scratch
out          two places that take turns, out_stride bytes apart; in one, token_bytes a token
"""

TOKENS_A_CHUNK = 8
NAP_US = 50
"""Of sleep; what the machine makes of it is measured."""


@kernel_njit
def wait_for_step_before(a):
    """True once the step before the one that is served has ended; False where nobody waits.

    By the last wait it sleeps as long as the end is two naps away or more, so that it is not late.
    """
    before = load_i64(a.step + EPOCH) - 1
    began, nap = cycle_counter(), load_i64(a.pace + 8)
    n_pauses = 0
    while ((atomic_load(a.done) & U32) - before) & U32 >= HALF:
        if atomic_load(a.step + ABORT) != 0:
            return False
        now = cycle_counter()
        if now - began + 2 * nap < load_i64(a.pace):
            call_i64(a.usleep, (NAP_US,))
            nap = cycle_counter() - now
            beat(a)
            continue
        pause()
        n_pauses += 1
        if n_pauses % BEAT_PAUSES == 0:
            beat(a)
        if n_pauses > YIELD_AFTER and n_pauses % YIELD_EVERY == 0:
            call_i64(a.sched_yield, (0,))
    if n_pauses > 0 or nap != load_i64(a.pace + 8):
        store_i64(a.pace, cycle_counter() - began)
        store_i64(a.pace + 8, nap - nap // 16)  # so that one that took very long is forgotten
    return True


@kernel_njit
def find_rows(a, token, chosen):
    """The token's rows, to `places`; they are on their way into the caches then.

    Asking for a page may wait for a disk that has much to do, so each row is a sign of life.
    """
    context = array(a.contexts + 4 * token * a.width, a.width, np.int32)
    multipliers = array(a.multipliers, a.n_gram, np.uint64)
    sizes, offsets = array(a.sizes, a.n_heads, np.uint64), array(a.offsets, a.n_heads, np.int64)
    places = array(a.places + 8 * token * a.n_heads, a.n_heads, np.int64)
    current = np.int64(context[0])
    if current < 0:
        current = max(np.int64(load_i32(chosen + 4 * (-1 - current))), np.int64(0))
    mixed = np.uint64(current) * multipliers[0]
    heads = a.n_heads // (a.n_gram - 1)
    ended = False
    for j in range(1, a.n_gram):
        before = np.int64(context[j])
        if before < 0 or before == a.end_token:
            ended = True
        mixed ^= np.uint64(a.end_token if ended else before) * multipliers[j]
        for head in range((j - 1) * heads, j * heads):
            place = a.table + (np.int64(mixed % sizes[head]) + offsets[head]) * a.row_bytes
            places[head] = place
            if a.madvise != 0:
                start = place // a.page_bytes * a.page_bytes
                call_i64(a.madvise, (start, place + a.row_bytes - start, a.advice))
            for offset in range(0, a.row_bytes, 64):
                prefetch(place + offset)
            prefetch(place + a.row_bytes - 1)
            beat(a)


@job_kernel
def gather_rows(args: int, chunk: int, worker: int) -> None:
    """Rows of TOKENS_A_CHUNK tokens."""
    a = array(args, 1, GATHER)[0]
    beat(a)
    if not wait_for_step_before(a):
        return
    epoch = load_i64(a.step + EPOCH)
    chosen = a.chosen + ((epoch - 1) & a.ring_mask) * a.chosen_stride
    first = chunk * TOKENS_A_CHUNK
    end = min(first + TOKENS_A_CHUNK, load_i64(a.n_tokens))
    for token in range(first, end):
        find_rows(a, token, chosen)
    places = array(a.places, end * a.n_heads, np.int64)
    for token in range(first, end):
        at = a.out + (epoch & 1) * a.out_stride + token * a.token_bytes
        for head in range(a.n_heads):
            row = array(places[token * a.n_heads + head], a.row_bytes, np.uint8)
            out = array(at + head * a.row_bytes, a.row_bytes, np.uint8)
            for i in range(a.row_bytes):
                out[i] = row[i]
            beat(a)  # its pages may have come from a disk


@job_kernel
def show_rows(args: int, chunk: int, worker: int) -> None:
    """Tell the GPU that all rows are there."""
    a = array(args, 1, GATHER)[0]
    if atomic_load(a.step + ABORT) == 0:
        atomic_store(a.exchange + READY, load_i64(a.step + EPOCH))
