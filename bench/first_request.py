"""The first request after a restart, with the profile of earlier ones and without any.

    python -m bench first_request model.gguf --cache 64 --out result.json

An engine without a profile answers requests, the last of which is the first one again, long after
it: that is steady. It leaves its profile when it closes. Then it is opened again with that, and
gets the same requests. The first one of each engine is compared with the steady one: the same text,
by a cache that has followed use for a while; with a profile they ought to be alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import runtime
from bench.agree import model_file
from bench.machine import machine

PROFILE = "LLAMA_MOE_CACHE_PROFILE"
TEMPERATURE, TOP_K = 1.5, 200
"""Varied texts: greedy ones of random weights repeat a few tokens."""
PROMPT = (5, 70, 71, 9)


@dataclass(frozen=True)
class Answer:
    """us  of each token behind the first one; hit_rate of all of them."""

    us: list[float]
    hit_rate: float
    ids: list[int]


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench first_request", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", type=int, default=64, help="experts of a layer on the GPU")
    parser.add_argument("--tokens", type=int, default=64, help="of a request")
    parser.add_argument("--requests", type=int, default=8, help="of each engine")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    path = model_file(args.model, args.folder)
    with TemporaryDirectory(prefix="first-request-") as folder:
        os.environ[PROFILE] = str(Path(folder) / "profile")
        without = asyncio.run(answers(path, args))
        with_one = asyncio.run(answers(path, args))
    steady = without[-1]
    found = {
        "without a profile": compared(without[0], steady),
        "with one": compared(with_one[0], steady),
    }
    same = all(answer.ids == steady.ids for answer in (without[0], with_one[0], with_one[-1]))
    print(json.dumps({**found, "same_ids": same}), flush=True)
    if args.out:
        runs = {"without": list(map(asdict, without)), "with": list(map(asdict, with_one))}
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"machine": machine(), "settings": settings, **found, "same_ids": same}
        args.out.write_text(json.dumps({**report, "runs": runs}, indent=1) + "\n")
    return 0 if same else 1


async def answers(path: Path, args: argparse.Namespace) -> list[Answer]:
    """The requests of one engine, from its start to its end."""
    config = runtime.EngineConfig(
        model=path,
        device=args.device,
        n_ctx=2 * args.tokens + 64,
        n_parallel=1,
        moe_expert_cache=args.cache,
        prefix_cache=False,
    )
    async with runtime.open_engine(config) as engine:
        seeds = [*range(1, args.requests), 1]
        return [await _answer(engine, args.tokens, seed) for seed in seeds]


async def _answer(engine: runtime.Engine, n_tokens: int, seed: int) -> Answer:
    sampling = runtime.SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=n_tokens, ignore_eos=True
    )
    before = _served(engine)
    ids: list[int] = []
    times: list[float] = []
    async for token in engine.generate(list(PROMPT), sampling):
        ids.append(-1 if token.id is None else token.id)
        times.append(time.perf_counter())
    hits, uses = (now - then for now, then in zip(_served(engine), before, strict=True))
    return Answer((1e6 * np.diff(times)).round(1).tolist(), hits / max(uses, 1), ids)


def _served(engine: runtime.Engine) -> tuple[int, int]:
    """Uses of experts so far: on a GPU, and all."""
    totals = engine.expert_totals
    if totals is None:
        return 0, 0
    return totals.hits, totals.hits + totals.cpu + totals.in_place + totals.fetched


def compared(request: Answer, steady: Answer) -> dict[str, object]:
    """A first request beside a steady one; the first token of each, which waits for the prompt's
    step, aside."""
    first_us, steady_us = float(np.mean(request.us[1:])), float(np.mean(steady.us[1:]))
    return {
        "first_us": round(first_us, 1),
        "steady_us": round(steady_us, 1),
        "first_slower_percent": round(100 * (first_us / steady_us - 1), 1),
        "first_hit_rate": round(request.hit_rate, 4),
        "steady_hit_rate": round(steady.hit_rate, 4),
    }
