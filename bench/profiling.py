"""What profiling costs, and what it says: decode speed with and without it, in pairs.

    python -m bench profiling model.gguf --device cuda --cache 64 --pairs 8 --out result.json

The two runs of a pair follow each other, and every other pair begins with the other one. Speeds are
of whole answers: the steps that are timed are a few of each 64, and so is their cost. Beside speeds
it gives the processor time of the loop's thread, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import runtime
from bench.machine import machine
from bench.streams import stream
from runtime.profiling.profiler import EVERY, TIMED
from runtime.profiling.summary import SchedProf


class Sums(runtime.Instrument):
    """How far the parts of steps are from their whole."""

    def __init__(self) -> None:
        self.timed_us: list[float] = []
        self.plain_us: list[float] = []
        self.worst_gap = 0.0

    def step_ended(self, record: runtime.StepRecord) -> None:
        if record.sort != "decode" or record.fresh:
            return
        (self.timed_us if record.timed else self.plain_us).append(1e6 * record.seconds)
        if record.timed:
            gap = abs(sum(record.parts.values()) - record.seconds) / record.seconds
            self.worst_gap = max(self.worst_gap, gap)


async def run(
    engine: runtime.Engine, args: argparse.Namespace, instruments: list[runtime.Instrument]
) -> tuple[float, float, list[int]]:
    """Tokens a second of one answer, the loop's microseconds a token, and its tokens."""
    for instrument in instruments:
        engine.attach(instrument)
    began = time.thread_time()
    answer = await stream(engine, args.prompt, args.tokens, 0)
    loop_us = 1e6 * (time.thread_time() - began) / args.tokens
    for instrument in instruments:
        engine.detach(instrument)
    return 1 / answer.token_seconds, loop_us, answer.ids


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Open the engine as asked, capture both kinds of graphs, then run the pairs."""
    config = runtime.EngineConfig(
        model=args.model,
        device=args.device,
        n_ctx=args.prompt + args.tokens + 1,
        n_parallel=1,
        moe_expert_cache=args.cache,
    )
    async with runtime.open_engine(config) as engine:
        lines: list[str] = []
        sums = Sums()
        for instruments in ([], [sums]):
            *_, expected = await run(engine, args, list(instruments))
        pairs: list[dict[str, float]] = []
        loops: list[dict[str, float]] = []
        same = True
        for number in range(args.pairs):
            speeds: dict[str, float] = {}
            loop: dict[str, float] = {}
            for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
                shown = SchedProf(lines.append, lambda: engine.expert_totals)
                attached = [sums, shown] if name == "with" else []
                speeds[name], loop[name], ids = await run(engine, args, attached)
                same = same and ids == expected
            pairs.append(speeds)
            loops.append(loop)
        costs = [100 * (pair["without"] / pair["with"] - 1) for pair in pairs]
        more = [loop["with"] - loop["without"] for loop in loops]
        print("\n".join(lines[-4:]))
        print(f"the loop's thread: {statistics.median(more):.1f} us a token more")
        print(f"cost: median {statistics.median(costs):.2f} % of {len(costs)} pairs; same: {same}")
        return {
            "machine": machine(),
            "executor": engine.executor.describe(),
            "tokens": args.tokens,
            "prompt_tokens": args.prompt,
            "timed": f"the last {TIMED} of each {EVERY} decode steps, {TIMED - 1} of them used",
            "tokens_per_second": pairs,
            "cost_percent": costs,
            "median_cost_percent": statistics.median(costs),
            "loop_us_a_token": loops,
            "median_loop_us_more": statistics.median(more),
            "same_tokens": same,
            "timed_step_us": sums.timed_us,
            "median_plain_step_us": statistics.median(sums.plain_us),
            "worst_gap_of_sum": sums.worst_gap,
            "lines": lines[-8:],
        }


def main(argv: list[str]) -> int:
    """Measure, print, and add to the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench profiling", description=__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file; default the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--cache", type=int, default=-1, help="experts of a layer in VRAM")
    parser.add_argument("--name", help="of the row in the file; default the model's")
    parser.add_argument("--out", type=Path, help="a file of rows by name")
    args = parser.parse_args(argv)
    # What earlier runs used must not fill the cache of this one.
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    row = asyncio.run(measure(args))
    if args.out:
        rows = json.loads(args.out.read_text()) if args.out.exists() else {}
        rows[args.name or Path(args.model or "bundled").stem] = row
        args.out.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    return 0
