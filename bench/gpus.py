"""One GPU beside all of the machine: speed, hits of each GPU's cache, and the same bits.

    python -m bench gpus qwen3-30b-a3b:8 --limits 2.5 --caches 64 --out result.json
    python -m bench gpus model.gguf --limits none,22

For each limit and each cache the model is opened on one GPU and split over all. First the engine
generates, as a user has it: greedily, with steps that run ahead where they can. Then tokens are
forced, the words of a recorded text, so that all variants compute the same; their logits are
compared bit by bit, and what each GPU's cache served is set beside what the plan predicted.
1 where bits or tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import runtime
from bench.agree import model_file
from bench.machine import machine
from bench.runs import Run, in_graph_us, recorded_ids
from runtime.engine.gpu.expected_hits import expected_hit_rate
from runtime.experts.totals import NOBODY, ON_GPU

SPLITS = {"one": "none", "all": "layer"}
FIRST_ID = 5
N_STAMPED = 16
PRINTED = (
    "gpus",
    "opened_seconds",
    "tokens_per_second",
    "median_us",
    "uses_of_each_gpu",
    "hit_rate",
    "expected_hit_rate",
    "logits",
)


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench gpus", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--limits", default="none", help="GiB of each GPU, or none, with commas")
    parser.add_argument("--caches", default="", help="experts of a layer in VRAM, with commas")
    parser.add_argument("--streams", default="1", help="answers at a time, with commas")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, and timed ones")
    parser.add_argument("--warm", type=int, default=128, help="forced tokens before the timed ones")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    # What earlier runs used must not fill the cache of this one.
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    path = model_file(args.model, args.folder)
    limits = [None if text == "none" else float(text) for text in _listed(args.limits)]
    cases: list[dict[str, Any]] = [{"vram_limit": limit} for limit in limits]
    cases += [{"moe_expert_cache": int(text)} for text in _listed(args.caches)]
    rows: list[dict[str, Any]] = []
    same = True
    for case in cases:
        for gpus in SPLITS:
            rows.append(asyncio.run(measure(path, case, gpus, args)))
            same &= all(rows[-1][what] == rows[0][what] for what in ("logits", "ids"))
            if args.out:  # each time, so that a run that is cut short leaves something
                settings = {name: str(value) for name, value in vars(args).items()}
                report = {"machine": machine(), "settings": settings, "same_bits": same}
                text = json.dumps({**report, "rows": rows}, indent=1, default=str)
                args.out.write_text(text + "\n")
            print(f"{case} {json.dumps({name: rows[-1][name] for name in PRINTED})}", flush=True)
    print(f"same bits: {same}")
    return int(not same)


async def measure(
    path: Path, case: dict[str, Any], gpus: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One variant: answers of the engine, then forced tokens."""
    streams = [int(n) for n in _listed(args.streams)]
    n_text = args.warm + args.tokens + 1
    config = runtime.EngineConfig(
        model=path,
        device="cuda",
        n_ctx=max(streams) * (-(-n_text // 64) * 64 + 64),
        n_parallel=max(streams),
        n_batch=512,
        split_mode=SPLITS[gpus],
        **case,
    )
    began = time.perf_counter()
    async with runtime.open_engine(config) as engine:
        opened = time.perf_counter() - began
        answers = [await together(engine, n, args.tokens) for n in streams]
        forced = await force(engine.executor, args.warm, args.tokens, max(streams))
        facts = engine.executor.describe()
    return {
        **case,
        "gpus": facts["gpu"],
        "direct_hand_over": facts.get("direct_hand_over"),
        "opened_seconds": round(opened, 2),
        "answers": [answer for answer, _ in answers],
        "tokens_per_second": [answer["tokens_per_second"] for answer, _ in answers],
        "ids": [digest for _, digest in answers],
        **forced,
        "each_gpu": facts.get("gpus"),
    }


async def together(engine: runtime.Engine, n: int, n_tokens: int) -> tuple[dict[str, Any], str]:
    """n answers at a time, twice, for the first captures graphs: times of the second, and ids."""
    params = runtime.SamplingParams.greedy(max_tokens=n_tokens, ignore_eos=True)

    async def answer(index: int) -> tuple[list[float], list[int | None]]:
        times, ids = [], []
        async for token in engine.generate([FIRST_ID + index], params, reuse_prefix=False):
            times.append(time.perf_counter())
            ids.append(token.id)
        return times, ids

    for _ in range(2):
        answers = await asyncio.gather(*(answer(index) for index in range(n)))
    each = [1e6 * np.diff(times) for times, _ in answers]
    found = {
        "streams": n,
        "tokens_per_second": round(n * 1e6 / max(float(us.mean()) for us in each), 1),
        "token_us": [round(float(us), 1) for us in each[0]],
    }
    return found, _digest(str([ids for _, ids in answers]).encode())


async def force(executor: Any, n_warm: int, n_timed: int, n_sequences: int) -> dict[str, Any]:
    """A text's tokens one after the other: times, who served their experts, digest of logits."""
    run = Run(executor, n_sequences)
    text = recorded_ids(n_warm + n_timed + 1, run.limits.n_vocab)
    logits, before = hashlib.sha256(), uses(executor)
    step_us: list[float] = []
    for position in range(n_warm + n_timed):
        if position == n_warm:
            before, step_us = uses(executor), []
        began = time.perf_counter()
        result = await run.decode([text], position)
        step_us.append(1e6 * (time.perf_counter() - began))
        logits.update(result.logits.tobytes())
    counts = [(end - start).tolist() for start, end in zip(before, uses(executor), strict=True)]
    last = n_warm + n_timed
    stamped = [run.decode_step([text], at) for at in range(max(last - N_STAMPED, 0), last)]
    waits = await in_graph_us(run, stamped)
    total = sum(sum(count) for count in counts)
    return {
        "step_us": [round(us, 1) for us in step_us],
        "median_us": round(float(np.median(step_us)), 1),
        "in_graph_us": waits,
        "uses_of_each_gpu": counts,
        "hit_rate": round(sum(count[ON_GPU] for count in counts) / total, 4) if total else None,
        "expected_hit_rate": expected_hit_rate(executor.planned),
        "slots": [list(plan.slots) for plan in executor.planned.experts],
        "logits": logits.hexdigest()[:16],
    }


def uses(executor: Any) -> list[Any]:
    """i64[kinds] of each GPU that misses experts: who served how many so far."""
    experts = executor._parts.experts
    held = [store for store in getattr(experts, "stores", (experts,)) if hasattr(store, "usage")]
    return [store.usage.by_layer.sum(axis=0)[:NOBODY] for store in held]


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
