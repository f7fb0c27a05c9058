"""Which experts each token uses, and each expert's list of tokens.

`route` chooses and weighs one token's experts from the router's logits; `group` sorts the choices
by expert, so that an expert's weights are read once for all its tokens, and tells the expert jobs
how many chunks they have.
"""

from __future__ import annotations

import numpy as np

from ops.cpu.elementwise import exp, sigmoid
from ops.cpu.job import args_record, clear, job_kernel, kernel_njit
from ops.cpu.memory import array, load_f32, load_i32, load_i64, store_f32, store_i32, store_i64

SOFTMAX, SIGMOID, SOFTMAX_SELECTED = 0, 1, 2
RENORMALISE_FLOOR = np.float32(2.0**-14)
MINUS_INFINITY = np.float32(-np.inf)
SUM_LANES = 32

ROUTE = args_record(
    "route",
    logits="i8",
    logits_stride="i8",
    n_expert="i8",
    n_used="i8",
    score="i8",
    bias="i8",
    n_groups="i8",
    n_groups_used="i8",
    renormalise="i8",
    choices="i8",
    weights="i8",
    shared_logits="i8",
    shared_weights="i8",
    scratch="i8",
    scratch_bytes="i8",
    scale="f4",
)
"""logits: f32 rows; bias: f32[n_expert] for the choice alone, or 0.

choices         i32[n_tokens][n_used], best first; ties go to the lower expert
weights         f32[n_tokens][n_used]
shared_logits   f32[n_tokens], the shared expert's gate, or 0; shared_weights gets its sigmoid
scratch         of each worker: f32[3][n_expert]
"""

GROUP = args_record(
    "group",
    choices="i8",
    n_tokens="i8",
    n_used="i8",
    n_expert="i8",
    counts="i8",
    active="i8",
    offsets="i8",
    slots="i8",
    slot_tokens="i8",
    gate_up_chunks="i8",
    gate_up_shared="i8",
    gate_up_per_expert="i8",
    down_chunks="i8",
    down_shared="i8",
    down_per_expert="i8",
)
"""counts       i32[n_expert]: uses of each expert in this step
active       i32: the experts in use, ascending
offsets      i32[n_active + 1]: first slot of each active expert; slots are sorted by expert, token
slots        i32[n_tokens][n_used]: the slot of each choice
slot_tokens  i32[n_slots]: the token of each slot
*_chunks     address of a job's number of chunks: shared + active experts * per_expert is stored
"""


@kernel_njit
def probabilities(a, logits, out, sums):
    """f32[n_expert] scores of one token; sums: see `sum_of_lanes`."""
    n = a.n_expert
    if a.score == SIGMOID:
        for i in range(n):
            out[i] = sigmoid(logits[i])
    elif a.score == SOFTMAX_SELECTED:
        for i in range(n):
            out[i] = logits[i]
    else:
        softmax(logits, out, n, sums)


@kernel_njit
def sum_of_lanes(x, n, sums):
    """Values 32 apart one after the other, then the halving tree over 32 sums, as a GPU's warp
    adds; sums is f32[min(n, 32)] of scratch.
    """
    width = min(n, SUM_LANES)
    for i in range(width):
        sums[i] = x[i]
    for i in range(width, n):
        sums[i % SUM_LANES] += x[i]
    half = SUM_LANES // 2
    while half > 0:
        for i in range(min(half, width - half)):
            sums[i] += sums[i + half]
        half //= 2
    return sums[0]


@kernel_njit
def softmax(x, out, n, sums):
    """out = softmax of n values; may be the same array.  sums: see `sum_of_lanes`."""
    peak = x[0]
    for i in range(1, n):
        if x[i] > peak:
            peak = x[i]
    for i in range(n):  # alone: it becomes vectors
        out[i] = exp(x[i] - peak)
    total = sum_of_lanes(out, n, sums)
    for i in range(n):
        out[i] = out[i] / total


@kernel_njit
def best(scores, n):
    """Index of the largest value, the lowest on ties; 0 where all are NaN."""
    found, largest = 0, scores[0]
    for i in range(1, n):
        score = scores[i]
        if score > largest or (largest != largest and score == score):
            found, largest = i, score
    return found


@kernel_njit
def keep_groups(a, selection, group_scores):
    """Minus infinity for the experts outside the groups with the best two-expert sums."""
    size = a.n_expert // a.n_groups
    for g in range(a.n_groups):
        first, second = MINUS_INFINITY, MINUS_INFINITY
        for i in range(g * size, (g + 1) * size):
            if selection[i] > first:
                first, second = selection[i], first
            elif selection[i] > second:
                second = selection[i]
        group_scores[g] = first + second if size > 1 else first
    for _ in range(a.n_groups - a.n_groups_used):
        worst = 0
        for g in range(1, a.n_groups):
            # Of equals the later one goes; a group that is gone has a NaN.
            if group_scores[worst] != group_scores[worst] or group_scores[g] <= group_scores[worst]:
                worst = g
        group_scores[worst] = np.float32(np.nan)
        for i in range(worst * size, (worst + 1) * size):
            selection[i] = MINUS_INFINITY


@job_kernel
def route(args: int, chunk: int, worker: int) -> None:
    """The experts of token `chunk` and their weights."""
    a = array(args, 1, ROUTE)[0]
    scratch = array(a.scratch + worker * a.scratch_bytes, (3, a.n_expert), np.float32)
    scores, selection, group_scores = scratch[0], scratch[1], scratch[2]
    logits = array(a.logits + chunk * a.logits_stride, a.n_expert, np.float32)
    probabilities(a, logits, scores, group_scores)
    for i in range(a.n_expert):
        bias = load_f32(a.bias + 4 * i) if a.bias != 0 else np.float32(0)
        selection[i] = scores[i] + bias if a.bias != 0 else scores[i]
    if a.n_groups > 1:
        keep_groups(a, selection, group_scores)
    choices = array(a.choices + 4 * chunk * a.n_used, a.n_used, np.int32)
    weights = array(a.weights + 4 * chunk * a.n_used, a.n_used, np.float32)
    total = np.float32(0)
    for j in range(a.n_used):
        expert = best(selection, a.n_expert)
        selection[expert] = np.float32(np.nan)  # never found again, even among minus infinities
        choices[j] = expert
        weights[j] = scores[expert]
        total += weights[j]
    if a.score == SOFTMAX_SELECTED:
        softmax(weights, weights, a.n_used, group_scores)
    elif a.renormalise != 0:
        total = RENORMALISE_FLOOR if total < RENORMALISE_FLOOR else total
        for j in range(a.n_used):
            weights[j] = weights[j] / total
    for j in range(a.n_used):
        weights[j] = weights[j] * a.scale
    if a.shared_logits != 0:
        gate = sigmoid(load_f32(a.shared_logits + 4 * chunk))
        store_f32(a.shared_weights + 4 * chunk, gate)


@job_kernel
def group(args: int, chunk: int, worker: int) -> None:
    """Counting sort of the choices by expert; the chunk counts of the expert jobs."""
    a = array(args, 1, GROUP)[0]
    n_slots = load_i64(a.n_tokens) * a.n_used
    clear(a.counts, 4 * a.n_expert)
    for i in range(n_slots):
        count = a.counts + 4 * np.int64(load_i32(a.choices + 4 * i))
        store_i32(count, np.int32(load_i32(count) + 1))
    n_active, first = 0, 0
    cursors = array(a.active + 4 * a.n_expert, a.n_expert, np.int32)
    for expert in range(a.n_expert):
        count = load_i32(a.counts + 4 * expert)
        cursors[expert] = first
        if count > 0:
            store_i32(a.active + 4 * n_active, np.int32(expert))
            store_i32(a.offsets + 4 * n_active, np.int32(first))
            n_active += 1
            first += count
    store_i32(a.offsets + 4 * n_active, np.int32(first))
    for i in range(n_slots):
        expert = load_i32(a.choices + 4 * i)
        slot = cursors[expert]
        cursors[expert] += 1
        store_i32(a.slots + 4 * i, np.int32(slot))
        store_i32(a.slot_tokens + 4 * np.int64(slot), np.int32(i // a.n_used))
    store_i64(a.gate_up_chunks, a.gate_up_shared + n_active * a.gate_up_per_expert)
    store_i64(a.down_chunks, a.down_shared + n_active * a.down_per_expert)
