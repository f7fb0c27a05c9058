"""Gated attention: queries that come with gates are separated from them; the gates come last.

A chunk is one row.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.gates import sigmoid_gate
from ops.cpu.job import args_record, job_kernel
from ops.cpu.memory import array, load_i32
from ops.cpu.rows import scale_row

GATED_HEADS = args_record(
    "gated heads",
    q="i8",
    q_stride="i8",
    gates="i8",
    gates_stride="i8",
    n_head="i8",
    dim_k="i8",
    dim_v="i8",
    tokens="i8",
    attended="i8",
    attended_stride="i8",
)
"""q: f32 rows of n_head times (dim_k queries, dim_v gates); strides are bytes a token.

gates     f32 rows of n_head * dim_v, room
tokens    i32: the token of each chunk of `gate_heads`; 0: chunk i is token i
attended  attention's output, f32 rows of n_head * dim_v
"""


@job_kernel
def split_gates(args: int, chunk: int, worker: int) -> None:
    """Move a token's gates to their row, and its queries together, in place."""
    a = array(args, 1, GATED_HEADS)[0]
    q, gates = a.q + chunk * a.q_stride, a.gates + chunk * a.gates_stride
    for head in range(a.n_head):
        # Never ahead of what is still to be read: a head's place lies before its source.
        source = q + 4 * head * (a.dim_k + a.dim_v)
        gate = source + 4 * a.dim_k
        scale_row(gates + 4 * head * a.dim_v, gate, a.dim_v, np.float32(1))
        scale_row(q + 4 * head * a.dim_k, source, a.dim_k, np.float32(1))


@job_kernel
def gate_heads(args: int, chunk: int, worker: int) -> None:
    """Multiply a token's attention output by the sigmoid of its gates."""
    a = array(args, 1, GATED_HEADS)[0]
    token = np.int64(chunk)
    if a.tokens != 0:
        token = np.int64(load_i32(a.tokens + 4 * chunk))
    out = a.attended + token * a.attended_stride
    sigmoid_gate(out, a.gates + token * a.gates_stride, a.n_head * a.dim_v)
