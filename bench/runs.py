"""Run: an executor of a model, and sequences of forced tokens in it; no sampler, no scheduler."""

from __future__ import annotations

import asyncio
import os
import re
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu.sampling import CHAIN, EDIT, PENALTIES
from runtime.config import EngineConfig
from runtime.engine import placement
from runtime.engine.executor import Executor
from runtime.engine.step import DeviceWork, Step, StepKind, StepResult
from runtime.experts.totals import N_KINDS
from runtime.progress import Progress

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

RECORDED = Path(__file__).parent / "moe" / "code.txt"
"""Its words are the forced tokens: they repeat as a real text does, whatever the vocabulary."""
WAIT_SECONDS = 0.05
PINNING_SECONDS = 120.0
FORCING = 1e9
"""Added to a token's logit: it is the one that is chosen."""
CANDIDATES = 40


def recorded_ids(n: int, n_vocab: int) -> I32:
    """i32[n]: a token for each word of the recorded text, equal ones for equal words."""
    words = re.findall(r"\w+|[^\w\s]|\n\s*", RECORDED.read_text())
    ids = [zlib.crc32(word.encode()) % n_vocab for word in words]
    return np.resize(np.array(ids, np.int32), n)


@dataclass(frozen=True)
class Timed:
    """Steps that were timed: microseconds of each, from the end of the one before, and who served
    the experts of its token, i64[n_steps, n_moe_layers, N_KINDS] (no layers: the GPU has all)."""

    us: list[float]
    counts: I64


class Run:
    """Sequences of an open executor: sequence s owns a range of pages and the state slot s."""

    def __init__(self, executor: Executor, n_sequences: int) -> None:
        self.executor, self.limits = executor, executor.limits
        self._per_sequence = executor.limits.n_pages // n_sequences

    async def prompt(
        self, sequence: int, text: I32, begin: int, end: int, outputs: Sequence[int] | None = None
    ) -> list[StepResult]:
        """Read tokens begin .. end of `text`, in as few steps as the executor takes.

        outputs  of each step, in its own numbers; None: its last token
        """
        results = []
        for first in range(begin, end, self.limits.max_step_tokens):
            last = min(first + self.limits.max_step_tokens, end)
            wanted = [last - first - 1] if outputs is None else outputs
            step = self.step(StepKind.PREFILL, [(sequence, text, first, last)], wanted)
            results.append(await self.executor.run(step))
        return results

    async def decode(self, texts: Sequence[I32], position: int) -> StepResult:
        """One token of each text, at the same position."""
        return await self.executor.run(self.decode_step(texts, position))

    async def run_ahead(self, text: I32, first: int, end: int) -> Timed:
        """Force tokens first .. end of sequence 0 the way an engine's answer is made: the GPU
        chooses each token, and where the executor runs ahead, the next step waits behind it.

        What is chosen is the text's next token, for its logit is raised; the text has one more.
        Raises: RuntimeError where another token was chosen.
        """
        executor: Any = self.executor
        follows = bool(executor.runs_ahead)
        times, counts = [], []
        began = time.perf_counter()
        flight = await executor.begin(self._forcing(text, first, follows=False))
        for position in range(first, end):
            behind = None
            if follows and position + 1 < end:
                behind = await executor.begin(self._forcing(text, position + 1, follows=True))
            await asyncio.sleep(0)  # a caller would read the token before
            result = await flight.result()
            now = time.perf_counter()
            times.append(1e6 * (now - began))
            began = now
            counts.append(_counts_of(result))
            if result.chosen is None or result.chosen.tokens[0] != text[position + 1]:
                raise RuntimeError(f"another token than that of the text at {position + 1}")
            if behind is None and position + 1 < end:
                behind = await executor.begin(self._forcing(text, position + 1, follows=False))
            flight = behind
        return Timed(times, np.array(counts))

    def _forcing(self, text: I32, position: int, *, follows: bool) -> Step:
        """The step of `text[position]`, behind which the next one of the text is chosen."""
        step = self.decode_step([text], position)
        edits, chain = np.zeros(1, EDIT), np.zeros(1, CHAIN)
        edits["id"], edits["bias"] = text[position + 1], FORCING
        chain["top_p"], chain["temperature"], chain["position"] = 0.95, 0.8, position + 1
        chain["log_min_p"], chain["min_keep"] = -np.inf, 1
        penalties = np.zeros(1, PENALTIES)
        penalties["repeat"] = 1.0
        work = (DeviceWork(CANDIDATES, edits, penalties, chain),)
        tokens = np.array([-1], np.int32) if follows else step.token_ids
        return replace(step, token_ids=tokens, sampling=work, follows=follows)

    def decode_step(self, texts: Sequence[I32], position: int) -> Step:
        """The step of `decode`."""
        parts = [(s, text, position, position + 1) for s, text in enumerate(texts)]
        return self.step(StepKind.DECODE, parts)

    def step(
        self,
        kind: StepKind,
        parts: Sequence[tuple[int, I32, int, int]],
        outputs: Sequence[int] | None = None,
    ) -> Step:
        """parts: sequence, all its text, and which tokens of it; outputs None: all tokens."""
        per, n_previous = self._per_sequence, self.limits.n_previous
        tokens = np.concatenate([text[a:b] for _, text, a, b in parts])
        rows = np.repeat(np.arange(len(parts)), [b - a for _, _, a, b in parts])
        before = [
            [text[a - j] if a >= j else -1 for j in range(1, n_previous + 1)]
            for _, text, a, _ in parts
        ]
        slots = [s for s, *_ in parts]
        wanted = range(len(tokens)) if outputs is None else outputs
        return Step(
            kind,
            tokens.astype(np.int32),
            np.concatenate([np.arange(a, b) for _, _, a, b in parts]).astype(np.int32),
            rows.astype(np.int32),
            np.array([np.arange(s * per, (s + 1) * per) for s in slots], np.int32),
            np.array(wanted, np.int32),
            state_slots=np.array(slots, np.int32) if self.limits.n_state_slots else None,
            previous_tokens=np.array(before, np.int32) if n_previous else None,
        )

    def experts(self) -> Any:
        """What holds the experts on the GPU and the CPU; None where all are in one place."""
        parts = getattr(self.executor, "_parts", None)
        held = None if parts is None else parts.experts
        return held if hasattr(held, "usage") else None


def config_of(
    model: Path | None, device: str, n_sequences: int, n_tokens: int, **settings: Any
) -> EngineConfig:
    """Room for so many sequences of so many tokens."""
    n_ctx = n_sequences * (-(-n_tokens // 64) * 64 + 64)
    return EngineConfig(model=model, device=device, n_ctx=n_ctx, n_parallel=n_sequences, **settings)


@asynccontextmanager
async def run_of(
    model: Path | None, device: str, n_sequences: int, n_tokens: int, **settings: Any
) -> AsyncIterator[Run]:
    """An executor with room for so many sequences of so many tokens; `settings` of EngineConfig.

    Raises: ConfigError, ModelError, DeviceError.
    """
    # What earlier runs used must not fill the cache of this one.
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    config = config_of(model, device, n_sequences, n_tokens, **settings)
    opened = await asyncio.to_thread(placement.open_placed, config, Progress())
    try:
        run = Run(opened.executor, n_sequences)
        await _until_pinned(run)
        yield run
    finally:
        await opened.close()


async def in_graph_us(run: Run, steps: Sequence[Step]) -> dict[str, float]:
    """What a step waits for, from stamps inside its graph (docs/profiling.md): means.

    With missed experts this is where the CPU's part and the exchange with it are seen.
    """
    executor: Any = run.executor
    executor.timed = True
    try:
        for step in [steps[0], *steps]:  # the first one captures the graph with stamps
            await executor.run(step)
        times = [found for found in executor.take_times() if not found.fresh]
    finally:
        executor.timed = False
    names = dict.fromkeys(name for found in times for name in found.parts)
    return {
        str(name): round(1e6 * sum(t.parts.get(name, 0.0) for t in times) / len(times), 1)
        for name in names
    }


def _counts_of(result: StepResult) -> I64:
    """i64[n_moe_layers, N_KINDS]: who served a step's experts, layers of all GPUs in a row."""
    uses = [use.counts.sum(axis=0) for _, parts in result.uses for use in parts]
    return np.concatenate(uses) if uses else np.zeros((0, N_KINDS), np.int64)


async def _until_pinned(run: Run) -> None:
    """Experts are pinned in the background; figures are of what comes after that."""
    host = getattr(run.experts(), "_host", None)
    until = time.perf_counter() + PINNING_SECONDS
    while host is not None and host.why_not_pinned is None and not host.pinned:
        if time.perf_counter() > until:
            break
        await asyncio.sleep(WAIT_SECONDS)
