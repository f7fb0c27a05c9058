"""The same tokens whatever serves the experts, and who did: the cache, uploads, the CPU, the link.

    python -m tests.support.cache_equality MODEL.gguf [--tokens 300] [--out result.json]

On a GPU: the model with none, a quarter, half and all of its experts in the cache; half of the
misses of a token are read in place, and one expert is uploaded a step. 1 where anything differs, or
where a way served fewer than a tenth of the uses in the runs together that have all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bench.machine import machine
from ops.gpu.router import in_place
from runtime.config import EngineConfig
from runtime.engine import placement
from runtime.engine.executor import Executor
from runtime.engine.gpu.executor import GPUExecutor
from runtime.engine.step import Step, StepKind
from runtime.experts import cache_settings
from runtime.experts.totals import ON_CPU, ON_GPU
from runtime.progress import Progress

I32 = NDArray[np.int32]

SHARES = (0.0, 0.25, 0.5, 1.0)
IN_PLACE_EVERY = 2
CHOSEN_AMONG = 40
SEED, FIRST_TOKEN = 99, 17
LEAST_SHARE = 0.1
WAYS = ("hit", "uploaded", "cpu", "in place")


@dataclass
class Followed:
    """What one run gave: digests of all logits, the tokens, and uses of experts by `WAYS`."""

    slots: int
    logits: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    gpu: str = ""


class UseRecorder:
    """A `RoutingRecorder` that counts who served; `experts` are the executor's `CachedExperts`."""

    def __init__(self, experts: Any, every: int, uses: dict[str, int]) -> None:
        self._table, self._every, self._uses = experts._table, every, uses
        self._since_the_start = self._table.ended == ON_GPU

    def record(self, step: Step, choices: I32) -> None:
        """See `RoutingRecorder.record`."""
        kinds = self._table.ended
        self._since_the_start &= kinds == ON_GPU
        layers = np.arange(len(kinds))[:, None, None]
        used, first = kinds[layers, choices], self._since_the_start[layers, choices]
        missed = used == ON_CPU
        read = in_place(missed, self._every) if self._every else np.zeros_like(missed)
        counts = (first, (used == ON_GPU) & ~first, missed & ~read, read)
        for way, count in zip(WAYS, counts, strict=True):
            self._uses[way] += int(count.sum())


async def follow(executor: Executor, n_tokens: int, slots: int, every: int) -> Followed:
    """Choose n_tokens greedily, then n_tokens by a seed, from the logits of one sequence."""
    followed = Followed(slots)
    if isinstance(executor, GPUExecutor) and executor._parts.exchange is not None:
        executor.recorder = UseRecorder(executor._parts.experts, every, followed.uses)
    for kind in ("greedy", "seeded"):
        digest, rng, token, tokens = hashlib.sha256(), np.random.default_rng(SEED), FIRST_TOKEN, []
        for position in range(n_tokens):
            logits = (await executor.run(one_token(executor, token, position))).logits[0].copy()
            digest.update(logits.tobytes())
            token = int(logits.argmax()) if kind == "greedy" else drawn(logits, rng)
            tokens.append(token)
        followed.logits[kind], followed.tokens[kind] = digest.hexdigest(), tokens
    return followed


def drawn(logits: NDArray[np.float32], rng: np.random.Generator) -> int:
    """A token among the best ones."""
    among = np.flatnonzero(logits >= np.partition(logits, -CHOSEN_AMONG)[-CHOSEN_AMONG])
    best = among[np.lexsort((among, -logits[among]))][:CHOSEN_AMONG]
    weights = np.exp(logits[best].astype(np.float64) - logits[best[0]])
    return int(rng.choice(best, p=weights / weights.sum()))


def one_token(executor: Executor, token: int, position: int) -> Step:
    pages = np.arange(executor.limits.n_pages, dtype=np.int32)[None]
    numbers = np.zeros(1, np.int32)
    tokens, positions = np.array([token], np.int32), np.array([position], np.int32)
    return Step(StepKind.DECODE, tokens, positions, numbers, pages, numbers)


@contextmanager
def every_way(every: int = IN_PLACE_EVERY) -> Iterator[None]:
    """Inside, caches are opened that have experts read in place, and upload so few that some of
    the first ones stay."""
    settings = partial(cache_settings.CacheSettings, in_place_every=every, uploads_a_step=1)
    with mock.patch.object(cache_settings, "CacheSettings", settings):
        yield


def differences(runs: list[Followed]) -> list[str]:
    """What is wrong with the runs, the last of which has all experts on the GPU."""
    wrong = [
        f"{run.slots} slots: other {what} ({kind})"
        for run in runs[:-1]
        for what in ("logits", "tokens")
        for kind in ("greedy", "seeded")
        if getattr(run, what)[kind] != getattr(runs[-1], what)[kind]
    ]
    shares = shares_of(runs).items()
    return wrong + [f"only {share:.1%} by {way}" for way, share in shares if share < LEAST_SHARE]


def shares_of(runs: list[Followed]) -> dict[str, float]:
    """What part of the uses each way served, in the runs together that have all of them."""
    total = {way: sum(run.uses[way] for run in runs) for way in WAYS}
    return {way: count / max(sum(total.values()), 1) for way, count in total.items()}


async def on_this_machine(path: Path, n_tokens: int, n_expert: int) -> list[Followed]:
    runs = []
    for share in SHARES:
        slots = round(share * n_expert)
        config = EngineConfig(
            model=path, device="cuda", moe_expert_cache=slots, n_ctx=2048, n_parallel=1, n_batch=64
        )
        with every_way():
            placed = await asyncio.to_thread(placement.open_placed, config, Progress())
        try:
            runs.append(await follow(placed.executor, n_tokens, slots, IN_PLACE_EVERY))
            runs[-1].gpu = str(placed.executor.describe().get("gpu"))
        finally:
            await placed.close()
        sys.stdout.write(f"{summary(runs[-1])}\n")
        sys.stdout.flush()
    return runs


def summary(run: Followed) -> str:
    """One line."""
    digests = {kind: digest[:16] for kind, digest in run.logits.items()}
    distinct = {kind: len(set(tokens)) for kind, tokens in run.tokens.items()}
    return f"{run.slots} slots: {digests}, {distinct} distinct tokens, {run.uses}"


def main() -> int:
    """Follow the model of the command line on this machine's GPU."""
    from runtime.models import open_model

    parser = argparse.ArgumentParser(prog="python -m tests.support.cache_equality")
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with open_model(args.model) as model:
        n_expert = model.spec.n_expert_max
    runs = asyncio.run(on_this_machine(args.model, args.tokens, n_expert))
    wrong = differences(runs)
    sys.stdout.write(f"{'; '.join(wrong) or 'all the same'}\n")
    if args.out:
        report = {
            "machine": machine(),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "shares": shares_of(runs),
            "runs": [asdict(run) for run in runs],
            "wrong": wrong,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
