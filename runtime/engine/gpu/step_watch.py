"""StepWatch: what steps that miss experts show about the plan, and what follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from runtime.engine.gpu.expected_hits import expected_hit_rate
from runtime.engine.gpu.gpu_parts import GPUParts
from runtime.engine.step import Step, StepKind
from runtime.experts.hit_check import HitCheck, check_links
from runtime.experts.miss_rates import F64, MissRates, spread_misses
from runtime.experts.miss_rule import MissRule
from runtime.experts.totals import NOBODY, ON_GPU, StepUse
from runtime.notices import Reason

KEPT = 0.98
"""Of what earlier tokens used, after another one that counts: one of `COUNT_EVERY`."""
COUNT_EVERY = 8
ENOUGH_TOKENS = 64
MIXED = -1


class StepWatch:
    """Of an executor whose steps may miss experts."""

    def __init__(self, parts: GPUParts) -> None:
        self._parts = parts
        expected, notices = expected_hit_rate(parts.planned), parts.planned.settings.notices
        self._hit_check = None if expected is None else HitCheck(expected, notices)
        self._rule: MissRule | None = parts.misses
        self._n_single = MIXED  # steps of one token since `_busy`, if there were no others
        self._n_decoded = 0
        self._busy = 0.0  # seconds of the team until then
        self._weight = 0.0  # of the tokens in `_seen`
        self._seen: list[F64] = []  # of each GPU's layers, f64[n_layers, 2]: uses, hits

    def ended(self, step: Step, use: Sequence[StepUse], seconds: float) -> None:
        """A step has ended, so long after the one before; what served its experts."""
        is_single = step.kind is StepKind.DECODE and step.n_tokens == 1
        self._n_single = self._n_single + 1 if is_single and self._n_single >= 0 else MIXED
        if step.kind is not StepKind.DECODE:
            return
        if self._rule is not None and is_single:
            self._rule.took(seconds)
            self._n_decoded += 1
            if self._n_decoded % COUNT_EVERY == 0:
                self._count(use)
        if self._hit_check is not None and self._hit_check.see(step.n_tokens, use):
            self._hit_check = None
            totals = self._parts.experts.totals()
            if totals is not None:
                check_links(totals, self._parts.planned.settings.notices)

    async def idle(self) -> None:
        """No step is in flight: who serves misses may change now.  Raises: CudaError."""
        rule = self._rule
        every = None if rule is None else rule.wanted(self._rates_now)
        if rule is not None and every is not None:
            done = await asyncio.to_thread(self._parts.memory.read_in_place, every)
            refused = rule.answered(every, done=done)
            if refused is not None:
                self._parts.planned.settings.notices.add(Reason.UNPINNED, refused)

    def _count(self, use: Sequence[StepUse]) -> None:
        if len(self._seen) != len(use):
            self._seen = [np.zeros((part.counts.shape[1], 2)) for part in use]
            self._weight = 0.0
        self._weight = KEPT * self._weight + 1
        for seen, part in zip(self._seen, use, strict=True):
            counts = part.counts[0]
            seen *= KEPT
            seen[:, 0] += counts[:, :NOBODY].sum(axis=1)
            seen[:, 1] += counts[:, ON_GPU]

    def _rates_now(self, rates: MissRates) -> tuple[MissRates, F64]:
        """The rates by what the last steps took, and what tokens miss."""
        misses = self._misses()
        exchange, totals = self._parts.exchange, self._parts.experts.totals()
        busy = 0.0 if exchange is None else exchange.team_seconds()[0]
        expected = rates.of_token(misses, 0)
        cpu = link = 1.0
        if self._n_single >= ENOUGH_TOKENS and expected and self._rule and not self._rule.every:
            cpu = 1e6 * (busy - self._busy) / self._n_single / expected
        if totals is not None and totals.swaps and rates.link_beside and totals.links[0].gb_s:
            first = totals.links[0]
            n_bytes = sum(link.uploaded for link in totals.links) / totals.swaps
            link = n_bytes / first.gb_s / 1e3 / rates.link_beside
        self._n_single, self._busy = 0, busy
        return rates.corrected(cpu, link), misses

    def _misses(self) -> F64:
        """How many of a token's layers miss 0, 1, ... experts, by the last tokens' hits."""
        uses = np.concatenate([seen[:, 0] for seen in self._seen] or [np.zeros(0)])
        hits = np.concatenate([seen[:, 1] for seen in self._seen] or [np.zeros(0)])
        shares = np.divide(hits, uses, out=np.ones_like(hits), where=uses > 0)
        n_used = np.rint(uses / max(self._weight, 1.0)).astype(int)
        return spread_misses(shares.tolist(), n_used.tolist())
