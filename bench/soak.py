"""Mixed requests for minutes or hours: no wrong token, no growth of memory, no lost request.

    python -m bench soak [model.gguf] --device cuda --cache 16 --minutes 8 --out result.json

First every request of a fixed set runs alone with the expert cache off. Then several clients send
the same requests in phases, each with its own vocabulary, so that the experts in use change; some
leave early, and the expert cache is resized while they wait. Every token has to be the one of the
first run. Memory is looked at between the warm-up and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import runtime
from bench.machine import machine

N_TOPICS, A_TOPIC = 6, 8
PHASE_SECONDS = 20.0
LOOK_SECONDS = 5.0
WARM_SHARE = 0.3
LEAVES_EARLY = 0.2


@dataclass(frozen=True)
class Request:
    """Prompt ids of one topic, and how the answer is chosen."""

    topic: int
    prompt: list[int]
    params: runtime.SamplingParams


@dataclass
class Outcome:
    """What was seen while the clients ran."""

    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    wrong: int = 0
    resizes: int = 0
    looks: list[dict[str, float]] = field(default_factory=list)


def requests(n_vocab: int, longest: int, seed: int) -> list[Request]:
    """The fixed set: a topic's prompts use an eighth of the vocabulary."""
    rng = np.random.default_rng(seed)
    made = []
    for topic in range(N_TOPICS):
        words = rng.permutation(n_vocab)[: max(n_vocab // 8, 16)]
        for i in range(A_TOPIC):
            prompt = rng.choice(words, int(rng.integers(4, longest))).tolist()
            n = int(rng.integers(8, 96))
            params = (
                runtime.SamplingParams.greedy(max_tokens=n, ignore_eos=True)
                if i % 2
                else runtime.SamplingParams(seed=1000 * topic + i, max_tokens=n, ignore_eos=True)
            )
            made.append(Request(topic, prompt, params))
    return made


async def answer(engine: runtime.Engine, request: Request, at_most: int | None = None) -> list[int]:
    """The ids of the answer, or of its first tokens."""
    ids: list[int] = []
    stream = engine.generate(request.prompt, request.params)
    try:
        async for token in stream:
            if token.id is not None:
                ids.append(token.id)
            if at_most is not None and len(ids) >= at_most:
                break
    finally:
        await stream.aclose()
    return ids


async def client(
    engine: runtime.Engine,
    work: list[Request],
    expected: list[list[int]],
    until: float,
    seen: Outcome,
    rng: random.Random,
) -> None:
    """Send requests of the present phase's topic until the time is over."""
    while time.perf_counter() < until:
        topic = int(time.perf_counter() / PHASE_SECONDS) % N_TOPICS
        index = topic * A_TOPIC + rng.randrange(A_TOPIC)
        leaves = rng.random() < LEAVES_EARLY
        wanted = expected[index]
        n = rng.randrange(1, len(wanted)) if leaves else None
        ids = await answer(engine, work[index], n)
        seen.answers += 1
        seen.cancelled += leaves
        seen.tokens += len(ids)
        seen.wrong += ids != wanted[: len(ids)] or (not leaves and len(ids) != len(wanted))


async def watch(until: float, seen: Outcome) -> None:
    """Look at the memory every few seconds."""
    began = time.perf_counter()
    while time.perf_counter() < until:
        await asyncio.sleep(min(LOOK_SECONDS, max(until - time.perf_counter(), 0.0)))
        seen.looks.append({"seconds": time.perf_counter() - began, **await memory()})


async def resize(engine: runtime.Engine, sizes: list[float], until: float, seen: Outcome) -> None:
    """Give the expert cache another size every half phase."""
    while sizes and time.perf_counter() < until - PHASE_SECONDS:
        await asyncio.sleep(PHASE_SECONDS / 2)
        await engine.resize(vram=sizes[seen.resizes % len(sizes)])
        seen.resizes += 1


async def memory() -> dict[str, float]:
    """MiB of this process in RAM, and of all GPUs that are taken."""
    statm = await asyncio.to_thread(Path("/proc/self/statm").read_text)
    pages = int(statm.split()[1])
    found = {"ram_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        run = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return found
    return found | {"vram_mib": float(sum(map(int, run.stdout.split())))}


def growth(looks: list[dict[str, float]], key: str) -> float | None:
    """MiB more at the end than after the warm-up, by the medians of three looks."""
    values = [look[key] for look in looks if key in look]
    start = int(len(values) * WARM_SHARE)
    if len(values) - start < 6:
        return None
    return float(np.median(values[-3:]) - np.median(values[start : start + 3]))


async def soak(args: argparse.Namespace) -> dict[str, object]:
    """Run it; the figures."""
    shared = {
        "model": args.model,
        "device": args.device,
        "n_ctx": args.streams * (args.longest + 128),
        "n_parallel": args.streams,
        "vram_limit": args.vram_limit,
    }
    off = 0 if args.device != "cpu" else None
    async with runtime.open_engine(runtime.EngineConfig(**shared, moe_expert_cache=off)) as engine:
        work = requests(engine.model.n_vocab, args.longest, args.seed)
        expected = [await answer(engine, request) for request in work]
    print(f"{len(work)} requests ran with the cache off, {sum(map(len, expected))} tokens")
    config = runtime.EngineConfig(**shared, moe_expert_cache=args.cache)
    seen = Outcome()
    async with runtime.open_engine(config) as engine:
        until = time.perf_counter() + 60 * args.minutes
        async with asyncio.TaskGroup() as tasks:
            for i in range(args.streams + 2):  # two always wait for a place
                rng = random.Random(args.seed + i)
                tasks.create_task(client(engine, work, expected, until, seen, rng))
            tasks.create_task(watch(until, seen))
            tasks.create_task(resize(engine, args.resize, until, seen))
        facts = engine.executor.describe()
    grown = {key: growth(seen.looks, key) for key in ("ram_mib", "vram_mib")}
    print(
        f"{seen.answers} answers ({seen.cancelled} left early), {seen.tokens} tokens, "
        f"{seen.resizes} resizes: {seen.wrong} wrong; grown by {grown} MiB"
    )
    return {
        "machine": machine(),
        "config": asdict(config),
        "executor": facts,
        "minutes": args.minutes,
        "grown": grown,
        **asdict(seen),
    }


def main(argv: list[str]) -> int:
    """Soak, print, write the result file if one is named; 1 if a token was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file; default the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--vram-limit", type=float, help="GiB of each GPU")
    parser.add_argument("--cache", type=int, help="experts of a layer in VRAM")
    parser.add_argument(
        "--resize", type=float, nargs="*", default=[], help="GiB of VRAM, taken in turn"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    result = asyncio.run(soak(args))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return int(bool(result["wrong"]))
