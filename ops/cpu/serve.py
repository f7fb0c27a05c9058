"""Experts that a GPU's step misses, computed by the team: the CPU's side of `ops.exchange`.

Two jobs a MoE layer. `receive` waits until the GPU posts the layer, or has gone past it, and sets
the number of chunks of the other one: none if the layer misses nothing. The first chunks of `serve`
compute hidden values, the others quantize them, multiply, and write the answers. A chunk goes
through all tokens of its expert, so weights are read once a step.

There is no barrier between the two kinds of chunks: down waits for its own expert's hidden values,
and fetches its weights meanwhile. Chunks are claimed in order, so whoever waits does so for workers
that are at it. Where those never come to an end nobody shows a sign of life: once the GPU has given
up on the step, whoever waits leaves. Hidden values travel as f32, because chunks of a single missed
expert are far smaller than what a scale spans; every worker quantizes them once for itself.

Of a few experts that one token each uses, workers take the chunks of their own first: see
`ops.cpu.own_chunks`. A forecast that came with the post is one chunk more, the first one; what it
says is fetched by the job behind these two, see `ops.cpu.look_ahead`.
"""

from __future__ import annotations

import numpy as np

from ops import exchange
from ops.cpu.activation import quantize_row
from ops.cpu.cycles import YIELD_AFTER, YIELD_EVERY
from ops.cpu.experts import (
    BATCH_TOKENS,
    FEED_FORWARD,
    FEED_FORWARD_SCRATCH_BYTES,
    GATE_UP_ROWS,
    gate_up_batch,
    slots_of,
)
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.linear import MATRIX, multiply
from ops.cpu.memory import (
    array,
    atomic_add,
    atomic_load,
    atomic_store,
    call,
    call_i64,
    load_i32,
    load_i64,
    pause,
    prefetch,
    store_i32,
    store_i64,
)
from ops.cpu.own_chunks import take_chunk
from ops.cpu.posts import (
    BEAT_PAUSES,
    FORESEEN,
    POSTED,
    TURN,
    U32,
    beat,
    is_given_up,
    sequence_of,
    wait_for_layer,
)

SERVE = args_record(
    "serve",
    exchange="i8",
    done="i8",
    step="i8",
    layer="i8",
    n_layers="i8",
    n_used="i8",
    records_offset="i8",
    answers_offset="i8",
    experts="i8",
    counts="i8",
    active="i8",
    offsets="i8",
    slot_tokens="i8",
    answers="i8",
    finished="i8",
    chunks="i8",
    n_gate_up="i8",
    n_owned="i8",
    gate_up_rows="i8",
    down_rows="i8",
    hidden_group="i8",
    hidden_bytes="i8",
    n_workers="i8",
    sched_yield="i8",
    queues="i8",
    look_ahead="i8",
    ahead="i8",
    fetch_chunks="i8",
    n_first="i8",
    quantized="i8",
    quantized_bytes="i8",
    scratch="i8",
    scratch_bytes="i8",
)
"""What the two jobs of one layer share.

exchange      memory as in `ops.exchange`; records_offset and answers_offset lie in it
done          u32 epoch of the last step that has ended
step          i64[3]: epoch of the step that is served; not 0: give up waiting; how many steps were
              served before, of all programs that share memory
experts       FEED_FORWARD record; x are the posted records, hidden values f32, nothing goes to out
counts        i32[n_expert], zero between layers
active, offsets, slot_tokens   as in `ops.cpu.router`, over missed slots
answers       i32: place of each missed slot in the posted list
finished      i64: finished gate and up chunks of each active expert
chunks        address of the number of chunks of `serve`
n_gate_up     how many of them are of gate and up, the first ones; set by `receive`
n_owned       active experts, if workers take their own chunks first; set by `receive`, else 0
*_rows        rows of a chunk; set by `receive`
queues        see `ops.cpu.own_chunks`
look_ahead    address of the function of `ops.cpu.look_ahead`, and `ahead` of its record; 0: none
fetch_chunks  address of the number of chunks of the job behind `serve`, which that function sets
n_first       1: the first chunk is that function's; set by `receive`
hidden_group  values under a scale of down's activation records, 1: f32; hidden_bytes of a record
quantized     of each worker, quantized_bytes apart: a tag, then records
sched_yield   address of the C function
"""

CHUNKS_A_WORKER = 6
GATE_UP_SHARE, DOWN_SHARE = 2, 3
"""Chunks of one expert for each worker, at most: a claim takes half a microsecond when all of them
want one."""
MOST_OWNED = 8
"""Experts; of more, all workers have enough to do anyway."""
GATE_UP_STEP, DOWN_STEP = 16, 32
"""Rows of a chunk are a multiple: products of several tokens go through so many at once."""
NARROW_STEP, LINE_ANSWERS = 2, 8
"""The same for one token an expert; answers fill whole lines."""
DOWN_ROWS = 512
"""Most rows of a down chunk."""
DOWN_TOKENS = 32
"""Tokens whose values and records a down chunk keeps at once."""
HEAD_BYTES = 4096
"""Of a chunk's rows, fetched before the product begins: the rest comes ahead of it by itself."""
WAITING_BYTES = 1 << 18
"""Of the same, by a worker that has to wait anyway: what its own cache has room for."""
QUANTIZED = 64
"""Where a worker's quantized hidden values begin, behind the tag that says whose they are."""


DOWN_SCRATCH_BYTES = 2 * 8 * DOWN_TOKENS + DOWN_TOKENS * 4 * DOWN_ROWS
SERVE_SCRATCH_BYTES = max(FEED_FORWARD_SCRATCH_BYTES, DOWN_SCRATCH_BYTES)
"""Of a worker, before the matrix product's own."""


def quantized_bytes(hidden_bytes: int) -> int:
    """Of a worker's quantized hidden values, with their tag; hidden_bytes of a record."""
    return QUANTIZED + DOWN_TOKENS * hidden_bytes


@kernel_njit
def fetch_rows(matrix, expert, first_row, n_rows, most):
    """Have up to `most` bytes of some rows brought closer."""
    address = matrix.weights + expert * matrix.slab_bytes + first_row * matrix.row_bytes
    n_bytes = min(n_rows * matrix.row_bytes, most)
    for offset in range(0, n_bytes, 64):
        prefetch(address + offset)


@kernel_njit
def turn_of(a):
    """A number of this service of the layer, which no other one has."""
    return load_i64(a.step + TURN) * a.n_layers + a.layer + 1


@kernel_njit
def group_misses(a, n_misses):
    """Counting sort of the posted slots by expert, in the order of each one's first slot."""
    misses = a.exchange + exchange.MISSES
    counts = array(a.counts, 1 << 16, np.int32)
    active, offsets = array(a.active, n_misses, np.int32), array(a.offsets, n_misses + 1, np.int32)
    n_active = 0
    for i in range(n_misses):
        expert = (load_i32(misses + 4 * i) >> 16) & 0xFFFF
        if counts[expert] == 0:
            active[n_active] = expert
            n_active += 1
        counts[expert] += 1
    first = 0
    for i in range(n_active):
        expert = active[i]
        offsets[i] = first
        first += counts[expert]
        counts[expert] = offsets[i]
    offsets[n_active] = first
    for i in range(n_misses):
        word = load_i32(misses + 4 * i)
        expert = (word >> 16) & 0xFFFF
        slot = np.int64(counts[expert])
        counts[expert] += 1
        store_i32(a.slot_tokens + 4 * slot, np.int32((word & 0xFFFF) // a.n_used))
        store_i32(a.answers + 4 * slot, np.int32(i))
    for i in range(n_active):
        counts[active[i]] = 0
    return n_active


@kernel_njit
def rows_of_a_chunk(n_rows, n_active, n_workers, share, step, most):
    """Rows of one expert's chunk, of n_rows in all: every worker takes several chunks of a layer,
    and `share` of them are enough."""
    rows = (n_rows + n_workers * share - 1) // (n_workers * share)
    rows = max(rows, n_active * n_rows // (n_workers * CHUNKS_A_WORKER))
    return min((rows + step - 1) // step * step, most)


@kernel_njit
def own_share_of_chunks(n_active, share):
    """The same for workers that take their own chunks: as many of each expert."""
    return max(min(share, CHUNKS_A_WORKER // n_active), 1)


@job_kernel
def receive(args: int, chunk: int, worker: int) -> None:
    """Wait for the layer, sort what it misses, and cut it into chunks."""
    a = array(args, 1, SERVE)[0]
    atomic_store(a.exchange + exchange.SERVED, sequence_of(a))
    beat(a)
    if a.ahead != 0:
        store_i64(a.fetch_chunks, 0)
    seen = wait_for_layer(a)
    if seen != POSTED:
        a.n_first = 1 if seen == FORESEEN and a.ahead != 0 else 0
        store_i64(a.chunks, a.n_first)
        return
    n_misses = np.int64(load_i32(a.exchange + exchange.N_MISSES))
    n_active = group_misses(a, n_misses)
    for i in range(n_active):
        store_i64(a.finished + 8 * i, 0)
    f = array(a.experts, 1, FEED_FORWARD)[0]
    narrow = n_active == n_misses
    owned = narrow and n_active <= MOST_OWNED
    a.n_owned = n_active if owned else 0
    of_share = np.int64(1) if owned else n_active
    share = own_share_of_chunks(n_active, GATE_UP_SHARE) if owned else GATE_UP_SHARE
    step = NARROW_STEP if narrow else GATE_UP_STEP
    rows = rows_of_a_chunk(f.n_ff, of_share, a.n_workers, share, step, GATE_UP_ROWS)
    a.gate_up_rows = rows
    a.n_gate_up = n_active * ((f.n_ff + rows - 1) // rows)
    share = own_share_of_chunks(n_active, DOWN_SHARE) if owned else DOWN_SHARE
    step = LINE_ANSWERS if narrow else DOWN_STEP
    rows = rows_of_a_chunk(f.n_out, of_share, a.n_workers, share, step, DOWN_ROWS)
    a.down_rows = rows
    a.n_first = 1 if a.ahead != 0 and load_i32(a.exchange + exchange.FORECAST) != 0 else 0
    n_down = n_active * ((f.n_out + rows - 1) // rows)
    store_i64(a.chunks, a.n_first + a.n_gate_up + n_down)


@kernel_njit
def gate_up_chunk(a, f, index, scratch):
    """Some hidden rows of one missed expert."""
    per_expert = (f.n_ff + a.gate_up_rows - 1) // a.gate_up_rows
    expert, slot, end_slot = slots_of(f, index // per_expert, 0)
    first_row = index % per_expert * a.gate_up_rows
    n_rows = min(a.gate_up_rows, f.n_ff - first_row)
    up_row = f.first_up_row + first_row
    fetch_rows(array(f.gate, 1, MATRIX)[0], expert, first_row, n_rows, HEAD_BYTES)
    fetch_rows(array(f.up, 1, MATRIX)[0], expert, up_row, n_rows, HEAD_BYTES)
    while slot < end_slot:
        n = min(BATCH_TOKENS, end_slot - slot)
        gate_up_batch(f, expert, slot, n, first_row, n_rows, scratch)
        slot += n
    atomic_add(a.finished + 8 * (index // per_expert), 1)


@kernel_njit
def answer_row(target, values, n, number):
    """Store n f32 as words that carry the layer's number."""
    words, bits = array(target, n, np.int64), array(values, n, np.int32)
    tag = number << 32
    for i in range(n):
        words[i] = tag | (np.int64(bits[i]) & U32)


@kernel_njit
def quantized(a, f, first_slot, n, worker):
    """Address of the records of n slots' hidden values, made at the worker's first chunk of them.

    Their tag is a number of this service of the layer, and the first slot.
    """
    at = a.quantized + worker * a.quantized_bytes
    tag = turn_of(a) * exchange.MAX_SLOTS + np.int64(first_slot)
    if load_i64(at) != tag:
        for t in range(n):
            hidden = f.hidden + (first_slot + t) * f.hidden_stride
            quantize_row(a.hidden_group, hidden, f.n_ff, at + QUANTIZED + t * a.hidden_bytes)
        store_i64(at, tag)
    return at + QUANTIZED


@kernel_njit
def answer_batch(a, f, expert, first_slot, n, rows, worker):
    """Answers of some rows of up to DOWN_TOKENS slots; rows: (first, end)."""
    first_row, end_row = rows
    n_rows = end_row - first_row
    number = sequence_of(a)
    scratch = a.scratch + worker * a.scratch_bytes
    x_ptrs, y_ptrs = scratch, scratch + 8 * DOWN_TOKENS
    values = scratch + 2 * 8 * DOWN_TOKENS
    records, record_bytes = f.hidden + first_slot * f.hidden_stride, f.hidden_stride
    if a.hidden_group != 1:
        records, record_bytes = quantized(a, f, first_slot, n, worker), a.hidden_bytes
    for t in range(n):
        store_i64(x_ptrs + 8 * t, records + t * record_bytes)
        store_i64(y_ptrs + 8 * t, values + 4 * (t * n_rows - first_row))
    down = array(f.down, 1, MATRIX)[0]
    multiply(down, expert, first_row, end_row, x_ptrs, y_ptrs, n, scratch + DOWN_SCRATCH_BYTES)
    for t in range(n):
        place = np.int64(load_i32(a.answers + 4 * (first_slot + t))) * f.n_out + first_row
        target = a.exchange + a.answers_offset + exchange.ANSWER_BYTES * place
        answer_row(target, values + 4 * t * n_rows, n_rows, number)


@kernel_njit
def down_chunk(a, f, index, worker):
    """Some output rows of one missed expert, as answers."""
    per_expert = (f.n_out + a.down_rows - 1) // a.down_rows
    expert, slot, end_slot = slots_of(f, index // per_expert, 0)
    first_row = index % per_expert * a.down_rows
    end_row = min(f.n_out, first_row + a.down_rows)
    down = array(f.down, 1, MATRIX)[0]
    finished = a.finished + 8 * (index // per_expert)
    n_expected = (f.n_ff + a.gate_up_rows - 1) // a.gate_up_rows
    most = HEAD_BYTES if atomic_load(finished) == n_expected else WAITING_BYTES
    fetch_rows(down, expert, first_row, end_row - first_row, most)
    n_pauses = 0
    while atomic_load(finished) < n_expected:
        pause()
        n_pauses += 1
        if n_pauses % BEAT_PAUSES == 0 and is_given_up(a):
            return
        if n_pauses > YIELD_AFTER and n_pauses % YIELD_EVERY == 0:
            call_i64(a.sched_yield, (0,))
    while slot < end_slot:
        n = min(DOWN_TOKENS, end_slot - slot)
        answer_batch(a, f, expert, slot, n, (first_row, end_row), worker)
        slot += n


@job_kernel
def serve(args: int, chunk: int, worker: int) -> None:
    """A chunk of either kind: this one, or rather one of the worker's own."""
    a = array(args, 1, SERVE)[0]
    beat(a)
    f = array(a.experts, 1, FEED_FORWARD)[0]
    chunk -= a.n_first
    if chunk < 0:
        call(a.look_ahead, (a.ahead, chunk, worker))
        return
    is_gate_up = chunk < a.n_gate_up
    index = chunk if is_gate_up else chunk - a.n_gate_up
    if a.n_owned > 0:
        queues = a.queues if is_gate_up else a.queues + 8
        n_rows = f.n_ff if is_gate_up else f.n_out
        rows = a.gate_up_rows if is_gate_up else a.down_rows
        index = take_chunk(queues, turn_of(a), worker, a.n_workers, a.n_owned, n_rows, rows)
    if is_gate_up:
        gate_up_chunk(a, f, index, a.scratch + worker * a.scratch_bytes)
    else:
        down_chunk(a, f, index, worker)
