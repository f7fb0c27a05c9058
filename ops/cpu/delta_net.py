"""The recurrence of a delta net: a sequence and a value head a chunk, token after token.

No head's numbers depend on another's, and a token's only on the state before it: any cut of a
prompt gives the same bits.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.delta_token import delta_token
from ops.cpu.elementwise import sigmoid
from ops.cpu.gates import SILU, floored_decay, sigmoid_gate, silu_gate, softplus_decay
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.memory import array, load_f32, store_f32
from ops.cpu.norm import rms_scale
from ops.cpu.rows import scale_by_row, scale_row
from ops.cpu.spans import SPAN, SPAN_BYTES
from ops.cpu.vector import dot

DELTA_NET = args_record(
    "delta net",
    spans="i8",
    states="i8",
    state_bytes="i8",
    n_key_head="i8",
    n_value_head="i8",
    head_dim="i8",
    qkv="i8",
    qkv_stride="i8",
    decay="i8",
    decay_stride="i8",
    decay_width="i8",
    decay_bias="i8",
    decay_rate="i8",
    has_floor="i8",
    beta="i8",
    beta_stride="i8",
    gate="i8",
    gate_stride="i8",
    gate_kind="i8",
    norm="i8",
    out="i8",
    out_stride="i8",
    scratch="i8",
    decay_floor="f4",
    q_scale="f4",
    l2_eps="f4",
    eps="f4",
)
"""See `runtime.models.delta_net.DeltaNetSpec`.  All numbers are f32, strides are bytes a token.

states       f32[n_value_head][head_dim][head_dim], of each slot, `state_bytes` apart
qkv          rows of n_key_head queries, as many keys, n_value_head values
decay_width  values of `decay` and `decay_bias` a head: 1 or head_dim
scratch      f32[n_workers][SCRATCH_ROWS][head_dim]
"""
SCRATCH_ROWS = 3


@kernel_njit
def of_length_one(out, x, n, eps, factor):
    """out = factor * x / sqrt(sum of squares + eps)."""
    scale_row(out, x, n, np.float32(1) / np.sqrt(dot(x, x, n) + eps))
    if factor != np.float32(1):
        scale_row(out, out, n, factor)


@kernel_njit
def decay_row(a, out, x, head):
    """What M's rows are multiplied by, f32[head_dim], from a token's decay values at x."""
    rate = load_f32(a.decay_rate + 4 * head)
    first = 4 * head * a.decay_width
    if a.has_floor:
        floored_decay(out, x + first, a.decay_bias + first, a.decay_width, rate, a.decay_floor)
    else:
        for i in range(a.decay_width):
            at = first + 4 * i
            value = softplus_decay(load_f32(x + at), load_f32(a.decay_bias + at), rate)
            store_f32(out + 4 * i, value)
    for i in range(a.decay_width, a.head_dim):
        store_f32(out + 4 * i, load_f32(out))


@job_kernel
def delta_net(args: int, chunk: int, worker: int) -> None:
    """One sequence and value head: see the module."""
    a = array(args, 1, DELTA_NET)[0]
    span = array(a.spans + SPAN_BYTES * (chunk // a.n_value_head), 1, SPAN)[0]
    head, n = chunk % a.n_value_head, a.head_dim
    key_head = head % a.n_key_head
    state = a.states + np.int64(span.slot) * a.state_bytes + 4 * head * n * n
    if span.position == 0:
        clear(state, 4 * n * n)
    q = a.scratch + worker * SCRATCH_ROWS * 4 * n
    k, decay = q + 4 * n, q + 8 * n
    for i in range(span.n_tokens):
        token = np.int64(span.token + i)
        row = a.qkv + token * a.qkv_stride
        of_length_one(q, row + 4 * key_head * n, n, a.l2_eps, a.q_scale)
        of_length_one(k, row + 4 * (a.n_key_head + key_head) * n, n, a.l2_eps, np.float32(1))
        v = row + 4 * (2 * a.n_key_head + head) * n
        decay_row(a, decay, a.decay + token * a.decay_stride, head)
        beta = sigmoid(load_f32(a.beta + token * a.beta_stride + 4 * head))
        out = a.out + token * a.out_stride + 4 * head * n
        delta_token(state, n, q, k, decay, v, beta, out)
        scale_by_row(out, out, a.norm, n, rms_scale(out, n, a.eps))
        gate = a.gate + token * a.gate_stride + 4 * head * n
        if a.gate_kind == SILU:
            silu_gate(out, gate, n)
        else:
            sigmoid_gate(out, gate, n)
