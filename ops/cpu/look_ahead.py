"""While the GPU is on its way to the next MoE layer: its experts' weights come nearer.

`look_ahead`, a chunk of each layer's `serve`, routes the forecast that came with the layer's post,
as the next layer's router would, and lists the experts among its choices that the CPU would have to
compute. In `fetch_ahead`, the job behind it, every worker has its own share of their rows brought
into its own cache, until the GPU posts: then it is known what is wanted. Which share that is,
`own_chunks` says; `serve` has the same workers compute the same rows.

A forecast that is wrong, torn or late costs time, and changes no result.
"""

from __future__ import annotations

import numpy as np

from ops import exchange
from ops.cpu.experts import FEED_FORWARD
from ops.cpu.job import args_record, job_kernel, kernel_njit
from ops.cpu.linear import MATRIX
from ops.cpu.memory import (
    array,
    atomic_load,
    call,
    load_i32,
    load_i64,
    prefetch,
    store_i64,
)
from ops.cpu.own_chunks import own_share
from ops.cpu.posts import HALF, U32, beat, sequence_of
from ops.cpu.program import LINE
from ops.cpu.router import ROUTE
from ops.cpu.serve import SERVE

LOOK_AHEAD = args_record(
    "look ahead",
    serve="i8",
    missing="i8",
    n_expert="i8",
    route="i8",
    routing="i8",
    experts="i8",
    listed="i8",
    chunks="i8",
)
"""What the two share.

serve    the layer's SERVE record
missing  i8[n_expert] of the next layer: 0 for experts that the CPU would compute; the host writes
         it while steps run
route    address of `ops.cpu.router.route`, and `routing` of the next layer's ROUTE record; its
         logits are the forecasts
experts  FEED_FORWARD record of the next layer
listed   i64[1 + MOST_AHEAD]: how many experts are fetched, and which
chunks   address of the number of chunks of `fetch_ahead`
"""

MOST_AHEAD = 6
"""Experts that are fetched: a share of one is about 200 KB, a tenth of a core's cache."""
CPU_COMPUTES = 0
PIECE = 1024
"""Bytes between two looks at what the GPU has posted."""


@kernel_njit
def posted_since(s):
    """Whether a later layer has posted, or handed over a forecast."""
    after = sequence_of(s) + 1
    posted = (atomic_load(s.exchange + exchange.POSTED) - after) & U32
    foreseen = (atomic_load(s.exchange + exchange.FORESEEN) - after) & U32
    return posted < HALF or foreseen < HALF


@kernel_njit
def expected(a, n_tokens, worker):
    """List the experts that the forecasts of n_tokens choose and the CPU would compute; how many.

    Those that a token wants most come first.
    """
    routing = array(a.routing, 1, ROUTE)[0]
    missing = array(a.missing, a.n_expert, np.int8)
    for token in range(n_tokens):
        call(a.route, (a.routing, token, worker))
    n_used = routing.n_used
    n_listed = np.int64(0)
    for rank in range(n_used):
        for token in range(n_tokens):
            expert = np.int64(load_i32(routing.choices + 4 * (token * n_used + rank)))
            if not 0 <= expert < a.n_expert or missing[expert] != CPU_COMPUTES:
                continue
            known = False
            for i in range(n_listed):
                known = known or load_i64(a.listed + 8 * (1 + i)) == expert
            if not known:
                n_listed += 1
                store_i64(a.listed + 8 * n_listed, expert)
                if n_listed == MOST_AHEAD:
                    return n_listed
    return n_listed


@job_kernel
def look_ahead(args: int, chunk: int, worker: int) -> None:
    """List what the next layer may want, as the layer's post says."""
    a = array(args, 1, LOOK_AHEAD)[0]
    s = array(a.serve, 1, SERVE)[0]
    stride = np.int64(load_i32(s.exchange + exchange.FORECAST))
    n_tokens = np.int64(load_i32(s.exchange + exchange.N_TOKENS))
    if stride <= 0 or not 0 < n_tokens <= exchange.FORECAST_TOKENS:
        return
    array(a.routing, 1, ROUTE)[0].logits_stride = stride
    n_listed = expected(a, n_tokens, worker)
    store_i64(a.listed, n_listed)
    if n_listed > 0:
        store_i64(a.chunks, s.n_workers)


@kernel_njit
def fetch_share(matrix, expert, first_row, n_rows, worker, s):
    """Fetch the worker's share of some rows; False if the GPU has posted meanwhile."""
    first, end = own_share(worker, s.n_workers, n_rows)
    at = matrix.weights + expert * matrix.slab_bytes + (first_row + first) * matrix.row_bytes
    stop = at + (end - first) * matrix.row_bytes
    while at < stop:
        if posted_since(s):
            return False
        for offset in range(0, min(PIECE, stop - at), LINE):
            prefetch(at + offset)
        at += PIECE
    return True


@job_kernel
def fetch_ahead(args: int, chunk: int, worker: int) -> None:
    """The worker's share of the listed experts, as far as there is time."""
    a = array(args, 1, LOOK_AHEAD)[0]
    s = array(a.serve, 1, SERVE)[0]
    f = array(a.experts, 1, FEED_FORWARD)[0]
    gate, up = array(f.gate, 1, MATRIX)[0], array(f.up, 1, MATRIX)[0]
    down = array(f.down, 1, MATRIX)[0]
    beat(s)
    for i in range(load_i64(a.listed)):
        expert = load_i64(a.listed + 8 * (1 + i))
        if not fetch_share(gate, expert, np.int64(0), f.n_ff, worker, s):
            return
        if not fetch_share(up, expert, f.first_up_row, f.n_ff, worker, s):
            return
        if not fetch_share(down, expert, np.int64(0), f.n_out, worker, s):
            return
