"""The launches that choose tokens from the logits of a step's outputs."""

from __future__ import annotations

import numpy as np

from ops.gpu.sampling import MAX_K, candidates, candidates_blocks, sample, scratch_bytes
from runtime.engine.gpu.plan_parts import PlanParts
from runtime.engine.gpu.results import CANDIDATES_AT, CHOSEN_BYTES, FLAGS_AT
from runtime.engine.gpu.step_shape import MAX_OUTPUTS, Sampling

COUNTERS_AT = 2 * FLAGS_AT
DEVICE_CHOSEN_BYTES = COUNTERS_AT + 4 * MAX_OUTPUTS
"""What stays on the GPU from step to step, and begins as zeros: the tokens chosen last, which the
next step may begin with, flags as in `results`, and the kernel's counters."""

Copy = tuple[int, int, int, int]
"""From, to, bytes and stride, as the kernel `report` takes it."""


def add_sampling(parts: PlanParts, logits: int, stride: int) -> list[Copy]:
    """Choose the tokens of all outputs; what `report` has to hand to the host.

    logits  address of f32[n_outputs, stride]
    """
    memory, n = parts.memory, parts.shape.n_outputs
    n_vocab = parts.model.spec.n_vocab
    chains = parts.shape.sampling is Sampling.CHAIN
    size = 4 * MAX_K * n
    ids, values = parts.room.place("candidates", size), parts.room.place("their logits", size)
    k = parts.control("k") if chains else parts.constants.place(np.ones(n, np.int32))
    shared = {"count": parts.output_count, "k": k, "n_vocab": n_vocab, "ids": ids, "values": values}
    parts.plan.add(
        "candidates",
        candidates(overlapped=parts.overlapped),
        (candidates_blocks(n_vocab), n),
        {
            **shared,
            "logits": logits,
            "stride": stride,
            "first_edit": parts.control("first_edit") if chains else 0,
            "edits": parts.control("edits") if chains else 0,
            "penalties": parts.control("penalties") if chains else 0,
            "epoch": memory.epoch,
            "flags": memory.chosen + FLAGS_AT,
            "scratch": parts.room.place("scratch of candidates", n * scratch_bytes(n_vocab)),
            "counters": memory.chosen + COUNTERS_AT,
            "tokens": memory.chosen,
        },
        overlapped=parts.overlapped,
    )
    copies = [(memory.chosen, memory.host_chosen, COUNTERS_AT, CHOSEN_BYTES)]
    if not chains:
        return copies
    parts.plan.add(
        "sample",
        sample(overlapped=parts.overlapped),
        (n,),
        {**shared, "chains": parts.control("chains"), "tokens": memory.chosen},
        overlapped=parts.overlapped,
    )
    for place, at in zip((ids, values), CANDIDATES_AT, strict=True):
        copies.append((place, memory.host_chosen + at, size, CHOSEN_BYTES))
    return copies
