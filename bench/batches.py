"""Time per token of decode steps by their number of sequences, 1 to 512: no step is a cliff.

    python -m bench batches qwen3-30b-a3b:6 --cache 64 --out result.json

Tokens are forced and differ between sequences; the GPU chooses the next ones where it can, as
greedy requests have it. The file names every run; `ratio` is a token's median time beside that of
the batch before in the list, which may hold gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.agree import model_file
from bench.machine import machine
from bench.runs import Run, recorded_ids, run_of
from runtime.engine.candidate_sampler import CandidateSampler
from runtime.engine.params import SamplingParams
from runtime.engine.sampling_vocabulary import SamplingVocabulary
from runtime.engine.step import Step

BATCHES = "1,2,3,4,6,8,12,16,24,31,32,48,64,65,96,127,128,129,160,192,255,256,257,384,511,512"
FIRST_POSITION, N_POSITIONS = 40, 60
N_WARM = 200
"""Steps of one token before all others: the cache then holds what is used."""
LARGEST_RATIO = 1.3


def main(argv: list[str]) -> int:
    """Time what the arguments ask for; 1 where a token takes 1.3 times that of the batch before."""
    parser = argparse.ArgumentParser(prog="python -m bench batches", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default=BATCHES, help="sequences of a step, with commas")
    parser.add_argument("--cache", type=int, default=-1, help="experts of a layer in VRAM")
    parser.add_argument(
        "--repeats", type=int, default=12, help="steps of each, the first two extra"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    result = asyncio.run(measure(args))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return int(result["largest_ratio"] > LARGEST_RATIO)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Open the model and time every batch."""
    batches = [int(part) for part in args.batches.split(",")]
    path, most = model_file(args.model, args.folder), max(batches)
    settings = {"moe_expert_cache": args.cache, "n_batch": 2048}
    if args.device != "cuda":
        settings = {}
    rows: list[dict[str, Any]] = []
    async with run_of(path, args.device, most, FIRST_POSITION + N_POSITIONS, **settings) as run:
        text = recorded_ids(FIRST_POSITION + N_POSITIONS, run.limits.n_vocab)
        for i in range(N_WARM if args.cache >= 0 else 0):
            await run.executor.run(step_of(run, text, 1, i))
        for n in batches:
            row = await time_of(run, text, n, args.repeats)
            row["ratio"] = row["us_a_token"] / rows[-1]["us_a_token"] if rows else 1.0
            rows.append(row)
            print(
                f"{n:4} sequences: {row['us']:8.0f} us a step, {row['us_a_token']:7.1f} a token, "
                f"x{row['ratio']:.2f}; {row['experts']}",
                flush=True,
            )
        facts = run.executor.describe()
    worst = max(rows, key=lambda row: float(row["ratio"]))
    print(f"largest: x{worst['ratio']:.2f} at {worst['batch']}")
    return {
        "machine": {**machine(), "gpu": facts.get("gpu")},
        "settings": {name: str(value) for name, value in vars(args).items()},
        "executor": facts,
        "largest_ratio": worst["ratio"],
        "rows": rows,
    }


async def time_of(run: Run, text: Any, n: int, repeats: int) -> dict[str, Any]:
    """The median of some steps of n sequences, and all of them."""
    before, times, sampled = counts(run), [], False
    for i in range(repeats + 2):
        step = step_of(run, text, n, i)
        sampled = step.sampling is not None
        began = time.perf_counter()
        await run.executor.run(step)
        times.append(1e6 * (time.perf_counter() - began))
    us = float(np.median(times[2:]))
    served = {name: count - before.get(name, 0) for name, count in counts(run).items()}
    return {
        "batch": n,
        "us": us,
        "us_a_token": us / n,
        "chosen_on_the_gpu": sampled,
        "experts": served,
        "all_us": [round(t, 1) for t in times],
    }


def step_of(run: Run, text: Any, n: int, i: int) -> Step:
    """The i-th step of n sequences, greedy where the executor chooses tokens."""
    texts = [np.roll(text, s) for s in range(n)]
    step = run.decode_step(texts, FIRST_POSITION + i % N_POSITIONS)
    vocabulary = SamplingVocabulary(run.limits.n_vocab)
    work = CandidateSampler(SamplingParams(temperature=0), vocabulary).device_work(1)
    samples = getattr(run.executor, "samples", None)
    if work is None or samples is None:
        return step
    sampled = replace(step, sampling=(work,) * n)
    return sampled if samples(sampled) else step


def counts(run: Run) -> dict[str, int]:
    """What served the experts so far."""
    facts = run.executor.describe()
    names = ("hits", "cpu_misses", "in_place_reads", "fetched")
    found = {name: facts.get(f"expert_{name}") for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}
