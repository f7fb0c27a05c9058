"""Steps on a CPU executor, without an engine: sequences of chosen tokens in chosen pages."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine.cpu_executor import CPUExecutor, open_cpu_executor
from runtime.engine.step import Step, StepKind
from runtime.models import Model

F32 = NDArray[np.float32]


@asynccontextmanager
async def executor_of(model: Model, **settings: Any) -> Any:
    """An executor of small limits, or other `settings` of `open_cpu_executor`."""
    chosen = {
        "n_ctx": 512,
        "max_sequences": 4,
        "max_step_tokens": 128,
        "n_threads": 2,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
    }
    executor = open_cpu_executor(model, **{**chosen, **settings})
    try:
        yield executor
    finally:
        await executor.close()


def step_of(
    executor: CPUExecutor,
    kind: StepKind,
    parts: list[tuple[int, NDArray[np.int32], int]],
    outputs: list[int] | None = None,
    texts: dict[int, NDArray[np.int32]] | None = None,
) -> Step:
    """Parts: (sequence, tokens, position of the first).  Sequence s owns every 4th page from s.

    texts: all tokens of each sequence, for models that look at those before a step's.
    """
    tokens = np.concatenate([tokens for _, tokens, _ in parts]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + len(t)) for _, t, p in parts]).astype(np.int32)
    rows = np.concatenate([np.full(len(t), i) for i, (_, t, _) in enumerate(parts)]).astype(
        np.int32
    )
    per_sequence = executor.limits.n_pages // 4
    table = np.array([[s + 4 * i for i in range(per_sequence)] for s, _, _ in parts], np.int32)
    wanted = np.arange(len(tokens)) if outputs is None else np.array(outputs)
    slots = np.array([s for s, _, _ in parts], np.int32)
    has_states, n = executor.limits.n_state_slots > 0, executor.limits.n_previous
    before = [
        [texts[s][p - j] if texts and j <= p else -1 for j in range(1, n + 1)] for s, _, p in parts
    ]
    return Step(
        kind, tokens, positions, rows, table, wanted.astype(np.int32),
        state_slots=slots if has_states else None,
        previous_tokens=np.array(before, np.int32) if n else None,
    )  # fmt: skip


async def logits_in_chunks(
    executor: CPUExecutor, tokens: NDArray[np.int32], size: int, kind: StepKind = StepKind.PREFILL
) -> F32:
    """The logits of one sequence's tokens, `size` of them a step."""
    rows = []
    for start in range(0, len(tokens), size):
        part = (1, tokens[start : start + size], start)
        step = step_of(executor, kind, [part], texts={1: tokens})
        rows.append((await executor.run(step)).logits.copy())
    return np.concatenate(rows)
