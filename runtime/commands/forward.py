"""ForwardPass: drives an executor directly, one sequence, without scheduler and sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from runtime.engine.executor import Executor
from runtime.engine.step import Step, StepKind
from runtime.errors import ConfigError

F32 = NDArray[np.float32]


class ForwardPass:
    """One sequence in the executor's first pages; `n_tokens` of it are computed.

    Nothing else may use the executor meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.n_tokens = 0

    @property
    def n_vocab(self) -> int:
        return self._executor.limits.n_vocab

    def rewind(self, n_tokens: int = 0) -> None:
        """Continue from the first `n_tokens` tokens."""
        self.n_tokens = n_tokens

    async def prefill(
        self, tokens: Sequence[int], wanted: range = range(0)
    ) -> list[tuple[range, F32]]:
        """Compute `tokens` in chunks.

        wanted  which of them (indices into `tokens`) need logits
        Returns (indices, f32[n, n_vocab], own copy) for each chunk that had some.
        Raises: ConfigError where the context is too small.
        """
        found = []
        for chunk in chunks(len(tokens), self._executor.limits.max_step_tokens):
            outputs = range(max(chunk.start, wanted.start), min(chunk.stop, wanted.stop))
            step = self._step(StepKind.PREFILL, tokens[chunk.start : chunk.stop])
            indices = np.arange(outputs.start, outputs.stop, dtype=np.int32) - chunk.start
            logits = await self._run(step, indices.astype(np.int32))
            if outputs:
                found.append((outputs, logits.copy()))
        return found

    async def decode(self, token: int) -> F32:
        """Compute one generated token; its logits f32[n_vocab], valid until the next call."""
        step = self._step(StepKind.DECODE, [token])
        logits: F32 = (await self._run(step, np.zeros(1, dtype=np.int32)))[0]
        return logits

    def _step(self, kind: StepKind, tokens: Sequence[int]) -> Step:
        limits = self._executor.limits
        end = self.n_tokens + len(tokens)
        n_pages = -(-end // limits.page_tokens)
        if n_pages > limits.n_pages:
            raise ConfigError(
                f"{end} tokens need more context than the {limits.n_pages * limits.page_tokens} "
                "that were set up: use a larger --ctx-size"
            )
        return Step(
            kind=kind,
            token_ids=np.asarray(tokens, dtype=np.int32),
            positions=np.arange(self.n_tokens, end, dtype=np.int32),
            rows=np.zeros(len(tokens), dtype=np.int32),
            page_tables=np.arange(n_pages, dtype=np.int32).reshape(1, -1),
            output_tokens=np.empty(0, dtype=np.int32),
        )

    async def _run(self, step: Step, outputs: NDArray[np.int32]) -> F32:
        result = await self._executor.run(replace(step, output_tokens=outputs))
        self.n_tokens += step.n_tokens
        return result.logits


def chunks(n: int, size: int) -> Iterator[range]:
    """0..n in ranges of at most `size`."""
    return (range(start, min(start + size, n)) for start in range(0, n, size))
