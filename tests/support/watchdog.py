"""CPU workers on bad days, on this machine's GPU: a typed error in time, and right tokens after it.

    python -m tests.support.watchdog MODEL.gguf [--out result.json]

A worker takes a chunk of a missed expert and is late by less than the GPU's patience; or by more;
or leaves its chunk undone, as one that raised or died would. The tests of the fake driver say the
same of each (tests/engine/test_gpu_bad_days.py), with a GPU whose patience they choose. 1 where an
answer is wrong, an error is another one, or something takes longer than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import machine
from ops.gpu.mailbox import PATIENCE_NS
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.errors import EngineError
from tests.support.serve_chunks import DOWN, FORECAST, GATE_UP, Chunk, trouble, undone

PATIENCE = PATIENCE_NS / 1e9
LATE, STALLED = 0.4 * PATIENCE, 1.75 * PATIENCE
N_TOKENS = 12
SPARE_SECONDS = 1.5
"""What a request may take beside what it has to wait for."""
LIMIT = 60.0
"""Seconds within which whatever happens has ended."""

Way = Callable[[Chunk, int, int, int], None]


@dataclass(frozen=True)
class Case:
    """A chunk of a kind goes another way, in the layer's `nth` service that has such a chunk: the
    first one is a prompt's. Then the request ends in `error`, "" for none, within so many seconds.
    """

    name: str
    kind: int
    way: Way
    error: str = ""
    seconds: float = 0.0
    nth: int = 1


def late_by(seconds: float) -> Way:
    def first(usual: Chunk, args: int, chunk: int, worker: int) -> None:
        time.sleep(seconds)
        usual(args, chunk, worker)

    return first


LOST = "ExchangeStalled"
CASES = (
    Case("a worker is late", GATE_UP, late_by(LATE), seconds=LATE),
    Case("a worker is late with a generated token", DOWN, late_by(LATE), "", LATE, nth=3),
    Case("a worker stalls", GATE_UP, late_by(STALLED), LOST, STALLED),
    Case("a worker stalls at its answers", DOWN, late_by(STALLED), LOST, STALLED),
    Case("a worker stalls with a generated token", GATE_UP, late_by(STALLED), LOST, STALLED, 4),
    Case("hidden values are never computed", GATE_UP, undone, LOST, PATIENCE),
    Case("answers are never computed", DOWN, undone, LOST, PATIENCE),
    Case("hidden values of a token are never computed", GATE_UP, undone, LOST, PATIENCE, 5),
    Case("answers of a token are never computed", DOWN, undone, LOST, PATIENCE, 5),
    Case("nobody looks at a forecast", FORECAST, undone),
)


async def tokens_of(engine: Engine) -> list[int | None]:
    params = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
    async with asyncio.timeout(LIMIT):
        return [t.id async for t in engine.generate([5, 70, 11], params, reuse_prefix=False)]


async def outcome(engine: Engine) -> tuple[str, list[int | None], float]:
    """The class of the error, "" for none; the tokens; how long it took."""
    began = time.perf_counter()
    try:
        return "", await tokens_of(engine), time.perf_counter() - began
    except (EngineError, TimeoutError) as error:
        return type(error).__name__, [], time.perf_counter() - began


def serves_of(engine: Engine) -> Any:
    exchange: Any = engine.executor._parts.exchange  # type: ignore[attr-defined]
    return exchange._serves


async def on_this_machine(config: EngineConfig) -> list[dict[str, Any]]:
    """What happened in each case; `wrong` says what should not have."""
    rows: list[dict[str, Any]] = []

    async def ask(engine: Engine, case: str, error: str, limit: float) -> None:
        got, tokens, seconds = await outcome(engine)
        wrong = []
        if got != error:
            wrong.append(f"expected {error or 'no error'}")
        if not error and rows and tokens != rows[0]["tokens"]:
            wrong.append("other tokens than those of the first run")
        if seconds > limit + SPARE_SECONDS:
            wrong.append(f"more than {limit + SPARE_SECONDS:g} s")
        rows.append({
            "case": case, "error": got, "tokens": tokens, "seconds": round(seconds, 3),
            "wrong": "; ".join(wrong),
        })  # fmt: skip
        sys.stdout.write(f"{case}: {got or 'no error'}, {seconds:.2f} s {'; '.join(wrong)}\n")
        sys.stdout.flush()

    async with open_engine(config) as engine:
        await ask(engine, "first run", "", LIMIT)
        for case in CASES:
            with trouble(serves_of(engine), 0, case.kind, case.way, nth=case.nth) as met:
                await ask(engine, case.name, case.error, case.seconds)
            if not met.n_met:
                rows[-1]["wrong"] += "; it did not happen"
            await ask(engine, "the next request", "", 0.0)
    async with open_engine(config) as engine:
        await ask(engine, "opened again", "", LIMIT)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.watchdog")
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=int, default=4, help="experts of a layer in VRAM")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, device="cuda", moe_expert_cache=args.cache, n_ctx=512, n_parallel=1
    )
    rows = asyncio.run(on_this_machine(config))
    if args.out:
        report = {"machine": machine(), "settings": {k: str(v) for k, v in vars(args).items()}}
        args.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
