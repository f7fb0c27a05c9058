"""Feed-forward blocks, dense and routed: gate, up, activation and quantization, then down.

An expert's chunks go through all its tokens, so its weights are read once a step.  Every (token,
choice) has a slot of its own in the results; `ops.cpu.norm` adds them up in the router's order.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.activation import quantize_row
from ops.cpu.elementwise import clamp_row, oai_mul, silu_mul
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.linear import MATRIX, multiply
from ops.cpu.memory import array, load_i32, load_i64, store_i64
from ops.cpu.rows import scale_row

SWIGLU, SWIGLU_CLAMPED, SWIGLU_OAI = 0, 1, 2
OAI_ALPHA = np.float32(1.702)
ONE = np.float32(1)
MINUS_INFINITY = np.float32(-np.inf)
BATCH_TOKENS = 128  # whose gate and up values fit the second-level cache
GATE_UP_ROWS = 256  # most rows of one gate/up chunk: one activation group
RECORD_BYTES = 1024  # of a record of GATE_UP_ROWS values

FEED_FORWARD = args_record(
    "feed forward",
    gate="i8",
    up="i8",
    down="i8",
    first_up_row="i8",
    n_ff="i8",
    n_out="i8",
    gate_up_rows="i8",
    down_rows="i8",
    x_gate="i8",
    x_gate_stride="i8",
    x_up="i8",
    x_up_stride="i8",
    hidden="i8",
    hidden_stride="i8",
    hidden_group="i8",
    out="i8",
    out_stride="i8",
    activation="i8",
    active="i8",
    offsets="i8",
    slot_tokens="i8",
    limit="f4",
)
"""One dense block, or all experts of a layer.

gate, up, down  addresses of MATRIX records; up's rows start at `first_up_row` of its matrix
*_rows          rows of a chunk; of gate_up a multiple of the hidden record's group
x_gate, x_up    activation records of the tokens
hidden, out     a record and f32[n_out] of each slot
hidden_group    values under one scale of the record; 1: the record is the f32 row
active, offsets, slot_tokens   see `ops.cpu.router`; slot_tokens 0: a dense block, slot = token
"""

FEED_FORWARDS = args_record(
    "feed forwards",
    dense="i8",
    dense_gate_up_chunks="i8",
    dense_down_chunks="i8",
    experts="i8",
    n_tokens="i8",
    scratch="i8",
    scratch_bytes="i8",
)
"""Addresses of FEED_FORWARD records (0: none); the chunks of the dense one come first."""

POINTERS = 8 * BATCH_TOKENS
VALUES = 4 * BATCH_TOKENS * GATE_UP_ROWS
FEED_FORWARD_SCRATCH_BYTES = 4 * POINTERS + RECORD_BYTES + 2 * VALUES


@kernel_njit
def activate(f, gate, up, n):
    """gate = activation(gate, up) for n values."""
    if f.activation != SWIGLU:
        clamp_row(gate, n, MINUS_INFINITY, f.limit)
        clamp_row(up, n, -f.limit, f.limit)
    if f.activation == SWIGLU_OAI:
        oai_mul(gate, up, gate, n, OAI_ALPHA)
    else:
        silu_mul(gate, up, gate, n)


@kernel_njit
def copy(source, target, n_bytes):
    """Copy bytes."""
    a, b = array(source, n_bytes, np.uint8), array(target, n_bytes, np.uint8)
    for i in range(n_bytes):
        b[i] = a[i]


@kernel_njit
def store_hidden(f, values, slot, first_row, n, record):
    """Quantize n values into their place of a slot's record; `record` is room for a small one."""
    target = f.hidden + slot * f.hidden_stride
    if f.hidden_group == 1:
        scale_row(target + 4 * first_row, values, n, ONE)
    elif n == f.n_ff:
        quantize_row(f.hidden_group, values, n, target)
    else:
        group = f.hidden_group
        quantize_row(f.hidden_group, values, n, record)
        copy(record, target + first_row, n)
        scales, all_scales = (n + 63) // 64 * 64, (f.n_ff + 63) // 64 * 64
        copy(record + scales, target + all_scales + 4 * (first_row // group), 4 * (n // group))
        sums = scales + (4 * (n // group) + 63) // 64 * 64
        all_sums = all_scales + (4 * (f.n_ff // group) + 63) // 64 * 64
        copy(record + sums, target + all_sums + 2 * (first_row // 16), 2 * ((n + 15) // 16))


@kernel_njit
def gate_up_batch(f, expert, first_slot, n, first_row, n_rows, scratch):
    """Hidden values of some rows of up to BATCH_TOKENS slots."""
    x_gate, x_up = scratch, scratch + POINTERS
    y_gate, y_up = scratch + 2 * POINTERS, scratch + 3 * POINTERS
    record = scratch + 4 * POINTERS
    gates, row_bytes = record + RECORD_BYTES, 4 * GATE_UP_ROWS
    ups, room = gates + VALUES, gates + 2 * VALUES
    up_row = f.first_up_row + first_row
    for t in range(n):
        token = np.int64(first_slot + t)
        if f.slot_tokens != 0:
            token = np.int64(load_i32(f.slot_tokens + 4 * token))
        store_i64(x_gate + 8 * t, f.x_gate + token * f.x_gate_stride)
        store_i64(x_up + 8 * t, f.x_up + token * f.x_up_stride)
        store_i64(y_gate + 8 * t, gates + t * row_bytes - 4 * first_row)
        store_i64(y_up + 8 * t, ups + t * row_bytes - 4 * up_row)
    gate, up = array(f.gate, 1, MATRIX)[0], array(f.up, 1, MATRIX)[0]
    multiply(gate, expert, first_row, first_row + n_rows, x_gate, y_gate, n, room)
    multiply(up, expert, up_row, up_row + n_rows, x_up, y_up, n, room)
    for t in range(n):
        values = gates + t * row_bytes
        activate(f, values, ups + t * row_bytes, n_rows)
        store_hidden(f, values, first_slot + t, first_row, n_rows, record)


@kernel_njit
def down_batch(f, expert, first_slot, n, first_row, end_row, scratch):
    """Output rows of up to BATCH_TOKENS slots."""
    hidden, out = scratch, scratch + POINTERS
    for t in range(n):
        slot = np.int64(first_slot + t)
        store_i64(hidden + 8 * t, f.hidden + slot * f.hidden_stride)
        store_i64(out + 8 * t, f.out + slot * f.out_stride)
    down = array(f.down, 1, MATRIX)[0]
    multiply(down, expert, first_row, end_row, hidden, out, n, scratch + 2 * POINTERS)


@kernel_njit
def place(a, chunk, dense_chunks):
    """Address of the record that a chunk belongs to, and the chunk's number within it."""
    if chunk < dense_chunks:
        return a.dense, chunk
    return a.experts, chunk - dense_chunks


@kernel_njit
def slots_of(f, index, n_tokens):
    """(expert, first slot, end slot) of the `index`th active expert; a dense block's tokens."""
    if f.slot_tokens == 0:
        return np.int64(0), np.int64(0), n_tokens
    expert = np.int64(load_i32(f.active + 4 * index))
    first = np.int64(load_i32(f.offsets + 4 * index))
    return expert, first, np.int64(load_i32(f.offsets + 4 * index + 4))


@job_kernel
def gate_up(args: int, chunk: int, worker: int) -> None:
    """Some hidden rows of one expert, or of the dense block."""
    a = array(args, 1, FEED_FORWARDS)[0]
    at, index = place(a, chunk, a.dense_gate_up_chunks)
    f = array(at, 1, FEED_FORWARD)[0]
    per_expert = (f.n_ff + f.gate_up_rows - 1) // f.gate_up_rows
    expert, slot, end_slot = slots_of(f, index // per_expert, load_i64(a.n_tokens))
    first_row = index % per_expert * f.gate_up_rows
    n_rows = min(f.gate_up_rows, f.n_ff - first_row)
    scratch = a.scratch + worker * a.scratch_bytes
    while slot < end_slot:
        n = min(BATCH_TOKENS, end_slot - slot)
        gate_up_batch(f, expert, slot, n, first_row, n_rows, scratch)
        slot += n


@job_kernel
def down(args: int, chunk: int, worker: int) -> None:
    """Some output rows of one expert, or of the dense block."""
    a = array(args, 1, FEED_FORWARDS)[0]
    at, index = place(a, chunk, a.dense_down_chunks)
    f = array(at, 1, FEED_FORWARD)[0]
    per_expert = (f.n_out + f.down_rows - 1) // f.down_rows
    expert, slot, end_slot = slots_of(f, index // per_expert, load_i64(a.n_tokens))
    first_row = index % per_expert * f.down_rows
    end_row = min(f.n_out, first_row + f.down_rows)
    scratch = a.scratch + worker * a.scratch_bytes
    while slot < end_slot:
        n = min(BATCH_TOKENS, end_slot - slot)
        down_batch(f, expert, slot, n, first_row, end_row, scratch)
        slot += n
