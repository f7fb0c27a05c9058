"""The first requests after a restart, beside the same ones without it.

    python -m bench first_request model.gguf --cache 64 --out result.json

One engine answers the requests of a history and then some more, and never ends: what those take is
steady. Another one answers the history alone and leaves its profile. Engines that begin with that
profile, with its lifetime counts alone and with none then get the same requests that the first one
had after the history. Texts are alike to the bit, so what differs is what the caches hold, and
whatever else is not ready in an engine that has just begun. All of it is done several times, with
other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import runtime
from bench.agree import model_file
from bench.machine import machine
from profiles import load_profile, save_profile
from runtime.engine.gpu.expected_hits import expected_hit_rate

PROFILE = "LLAMA_MOE_CACHE_PROFILE"
TEMPERATURE, TOP_K = 100.0, 200
"""Varied texts: the logits of random weights may lie far apart."""
PROMPT_TOKENS = 8
PIECE = 16
"""Tokens over which hits are told."""
CASES = ("no restart", "whole profile", "counts alone", "no profile")
STEADY, RESTARTED, COUNTED, NEW = CASES


@dataclass(frozen=True)
class Answer:
    """first_us  from the request to its first token; us: of each token behind it
    hit_rates  of each `PIECE` tokens
    expected_hit_rate  by the engine's plan
    """

    first_us: float
    us: list[float]
    hit_rate: float
    hit_rates: list[float]
    ids: list[int]
    expected_hit_rate: float | None = None


Run = Mapping[str, Sequence[Answer]]
"""The answers behind the history, by case."""


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench first_request", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", type=int, default=64, help="experts of a layer on the GPU")
    parser.add_argument("--split", choices=["none", "layer"], default="none", help="over all GPUs")
    parser.add_argument("--tokens", type=int, default=64, help="of a request")
    parser.add_argument("--history", type=int, default=16, help="requests before the restart")
    parser.add_argument("--requests", type=int, default=3, help="behind it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", type=int, default=1, help="rounds with the other profiles, too")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds from start to requests")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    path = model_file(args.model, args.folder)
    runs: list[Run] = []
    for number in range(args.rounds):
        runs.append(one_round(path, args, number))
        found = {case: compared(runs, case) for case in CASES[1:] if case in runs[0]}
        print(json.dumps({**found, "same_ids": same(runs)}), flush=True)
        if args.out:
            settings = {k: str(v) for k, v in vars(args).items()}
            report = {"machine": machine(), "settings": settings, **found, "same_ids": same(runs)}
            raw = [{case: list(map(asdict, run[case])) for case in run} for run in runs]
            args.out.write_text(json.dumps({**report, "runs": raw}) + "\n")
    return 0 if same(runs) else 1


def one_round(path: Path, args: argparse.Namespace, number: int) -> Run:
    """Every case once, each in an engine of its own."""
    n_seeds = args.history + args.requests
    seeds = list(range(number * n_seeds, (number + 1) * n_seeds))
    history, new = seeds[: args.history], seeds[args.history :]
    with TemporaryDirectory(prefix="first-request-") as folder:
        kept, used = Path(folder) / "kept", Path(folder) / "used"

        def ask(profile: Path | str, seeds: list[int]) -> list[Answer]:
            os.environ[PROFILE] = str(profile)
            return asyncio.run(answers(path, args, seeds))

        steady = ask("0", history + new)[len(history) :]
        ask(kept, history)
        shutil.copy(kept, used)
        run = {STEADY: steady, RESTARTED: ask(used, new)}
        if number >= args.others:
            return run
        save_profile(used, replace(load_profile(kept), recent=None))
        return {**run, COUNTED: ask(used, new), NEW: ask("0", new)}


async def answers(path: Path, args: argparse.Namespace, seeds: Sequence[int]) -> list[Answer]:
    """The requests of one engine, from its start to its end."""
    config = runtime.EngineConfig(
        model=path,
        device=args.device,
        n_ctx=2 * args.tokens + 64,
        n_parallel=1,
        moe_expert_cache=args.cache,
        split_mode=args.split,
        prefix_cache=False,
    )
    async with runtime.open_engine(config) as engine:
        await asyncio.sleep(args.idle)
        found = [await _answer(engine, args.tokens, seed) for seed in seeds]
        planned = getattr(engine.executor, "planned", None)
        expected = None if planned is None else expected_hit_rate(planned)
        return [replace(answer, expected_hit_rate=expected) for answer in found]


async def _answer(engine: runtime.Engine, n_tokens: int, seed: int) -> Answer:
    sampling = runtime.SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=n_tokens, ignore_eos=True
    )
    prompt = [(7 * seed + 3 * at) % 90 + 5 for at in range(PROMPT_TOKENS)]
    served, ids, times = [_served(engine)], [], [time.perf_counter()]
    async for token in engine.generate(prompt, sampling):
        times.append(time.perf_counter())
        ids.append(-1 if token.id is None else token.id)
        if len(ids) % PIECE == 0:
            served.append(_served(engine))
    served.append(_served(engine))
    first_us, *us = (1e6 * np.diff(times)).round(1).tolist()
    rates = [_rate(then, now) for then, now in pairwise(served)]
    n_pieces = -(-len(ids) // PIECE)
    return Answer(first_us, us, _rate(served[0], served[-1]), rates[:n_pieces], ids)


def _rate(then: tuple[int, int], now: tuple[int, int]) -> float:
    hits, uses = now[0] - then[0], now[1] - then[1]
    return round(hits / max(uses, 1), 4)


def _served(engine: runtime.Engine) -> tuple[int, int]:
    """Uses of experts so far: on a GPU, and all."""
    totals = engine.expert_totals
    if totals is None:
        return 0, 0
    return totals.hits, totals.hits + totals.cpu + totals.in_place + totals.fetched


def compared(runs: Sequence[Run], case: str) -> dict[str, object]:
    """The first request of a case beside the same one without a restart: microseconds a token of
    all, of the first `PIECE`, to the first. Medians over all tokens of the rounds that have the
    case, which another process on the machine hardly moves; and means."""
    runs = [run for run in runs if case in run]
    first, steady = ([run[name][0] for run in runs] for name in (case, STEADY))
    found: dict[str, object] = {"rounds": len(runs)}
    for name, values, mean in (
        ("us", lambda answer: answer.us, np.median),
        ("mean_us", lambda answer: answer.us, np.mean),
        ("first_tokens_us", lambda answer: answer.us[: PIECE - 1], np.median),
        ("first_tokens_mean_us", lambda answer: answer.us[: PIECE - 1], np.mean),
        ("to_first_us", lambda answer: [answer.first_us], np.median),
    ):
        ours, theirs = (
            float(mean(np.concatenate([values(answer) for answer in answers])))
            for answers in (first, steady)
        )
        found[name] = round(ours, 1)
        found[f"steady_{name}"] = round(theirs, 1)
        found[f"{name}_slower_percent"] = round(100 * (ours / theirs - 1), 1)
    for name, answers in (("hit_rates", first), ("steady_hit_rates", steady)):
        found[name] = np.mean([answer.hit_rates for answer in answers], axis=0).round(4).tolist()
    found["expected_hit_rate"] = first[0].expected_hit_rate
    return found


def same(runs: Sequence[Run]) -> bool:
    """Whether all engines of each round gave the same texts."""
    return all(
        [answer.ids for answer in answers] == [answer.ids for answer in run[STEADY]]
        for run in runs
        for answers in run.values()
    )
