"""Mixed requests for minutes or hours: no wrong token, no growth of memory, no lost request.

    python -m bench soak [model.gguf] --device cuda --cache 16 --minutes 8 --out result.json

First every request of a fixed set runs alone with the expert cache off. Then several clients send
the same requests in phases, each with its own vocabulary, so that the experts in use change; some
leave early, and the expert cache is resized while they wait. Every token has to be the one of the
first run. Every look at the memory also compares a few experts on the GPU with the file. Growth is
what the memory holds more at the end than after the warm-up, without the cache's slots, which come
and go with resizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import runtime
from bench.machine import machine
from bench.slot_check import GPUMemory, SlotCheck, cache_of, vram_for

N_TOPICS = 6
SHORTEST = 8
LOOK_SECONDS = 5.0
WARM_SHARE = 0.3
LEAVES_EARLY = 0.2
SLOTS_A_LOOK = 4


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
    slots_checked: int = 0
    slots_wrong: int = 0
    looks: list[dict[str, float]] = field(default_factory=list)


def requests(n_vocab: int, longest: int, answer: int, a_topic: int, seed: int) -> list[Request]:
    """The fixed set: a topic's prompts use an eighth of the vocabulary.

    longest, answer: a prompt and an answer have fewer tokens;  a_topic: requests of each topic
    """
    rng = np.random.default_rng(seed)
    made = []
    for topic in range(N_TOPICS):
        words = rng.permutation(n_vocab)[: max(n_vocab // 8, 16)]
        for i in range(a_topic):
            prompt = rng.choice(words, int(rng.integers(4, longest))).tolist()
            n = int(rng.integers(min(SHORTEST, answer - 1), answer))
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
    phase: float,
    seen: Outcome,
    rng: random.Random,
) -> None:
    """Send requests of the present phase's topic until the time is over."""
    while time.perf_counter() < until:
        topic = int(time.perf_counter() / phase) % N_TOPICS
        a_topic = len(work) // N_TOPICS
        index = topic * a_topic + rng.randrange(a_topic)
        leaves = rng.random() < LEAVES_EARLY
        wanted = expected[index]
        n = rng.randrange(1, len(wanted)) if leaves else None
        ids = await answer(engine, work[index], n)
        seen.answers += 1
        seen.cancelled += leaves
        seen.tokens += len(ids)
        seen.wrong += ids != wanted[: len(ids)] or (not leaves and len(ids) != len(wanted))


async def watch(
    engine: runtime.Engine,
    until: float,
    gpu: GPUMemory | None,
    check: SlotCheck | None,
    seen: Outcome,
    rng: random.Random,
    save: Callable[[], object],
) -> None:
    """Look at the memory every few seconds, and at some slots; `save` what was seen so far, so that
    a run that is stopped has told that much."""
    began = time.perf_counter()
    while time.perf_counter() < until:
        await asyncio.sleep(min(LOOK_SECONDS, max(until - time.perf_counter(), 0.0)))
        look = {"seconds": time.perf_counter() - began, **await asyncio.to_thread(memory, gpu)}
        look |= {"answers": seen.answers, "wrong": seen.wrong, "resizes": seen.resizes}
        if check is not None:
            look["slots_mib"] = slots_mib(engine)
            checked, wrong = await check.some(engine, SLOTS_A_LOOK, rng)
            seen.slots_checked += checked
            seen.slots_wrong += wrong
        seen.looks.append(look)
        save()


def slots_mib(engine: runtime.Engine) -> float:
    """Of the cache's slots now."""
    n_bytes = engine.executor.describe().get("expert_bytes", 0)
    return float(str(n_bytes)) / 2**20


async def resize(
    engine: runtime.Engine, sizes: list[int], until: float, phase: float, seen: Outcome
) -> None:
    """Give the expert cache another size every half phase: experts a layer, in turn."""
    while sizes and time.perf_counter() < until - phase:
        await asyncio.sleep(phase / 2)
        await engine.resize(vram=vram_for(engine, sizes[seen.resizes % len(sizes)]))
        seen.resizes += 1


def memory(gpu: GPUMemory | None) -> dict[str, float]:
    """MiB of this process in RAM, and of the GPUs' memory that is taken.

    Without pages of files: they are others' too, and come and go with who reads them, such as
    `SlotCheck`.
    """
    pages, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    found = {"ram_mib": (pages - of_files) * os.sysconf("SC_PAGE_SIZE") / 2**20}
    return found if gpu is None else found | {"vram_mib": gpu.taken() / 2**20}


def growth(looks: list[dict[str, float]], key: str, *, without_slots: bool = False) -> float | None:
    """MiB more at the end than after the warm-up, by the medians of the first and the last third
    of the looks after it: steps take and give back some memory all the time."""
    values = [
        look[key] - (look.get("slots_mib", 0.0) if without_slots else 0.0)
        for look in looks
        if key in look
    ]
    start = int(len(values) * WARM_SHARE)
    if len(values) - start < 6:
        return None
    third = (len(values) - start) // 3
    return float(np.median(values[-third:]) - np.median(values[start : start + third]))


async def soak(args: argparse.Namespace) -> dict[str, object]:
    """Run it; the figures."""
    shared = {
        "model": args.model,
        "device": args.device,
        "n_ctx": args.streams * (args.longest + args.answer + 32),
        "n_parallel": args.streams,
        "vram_limit": args.vram_limit,
    }
    off = 0 if args.device != "cpu" else -1
    async with runtime.open_engine(runtime.EngineConfig(**shared, moe_expert_cache=off)) as engine:
        work = requests(engine.model.n_vocab, args.longest, args.answer, args.a_topic, args.seed)
        expected = [await answer(engine, request) for request in work]
    print(f"{len(work)} requests ran with the cache off, {sum(map(len, expected))} tokens")
    config = runtime.EngineConfig(**shared, moe_expert_cache=args.cache)
    seen, began = Outcome(), time.time()
    async with runtime.open_engine(config) as engine:

        def save() -> dict[str, object]:
            result = told(args, config, seen, began) | {"executor": engine.executor.describe()}
            if args.out:
                args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
            return result

        await clients(engine, args, work, expected, seen, save)
        result = save()
    print(
        f"{seen.answers} answers ({seen.cancelled} left early), {seen.tokens} tokens, "
        f"{seen.resizes} resizes: {seen.wrong} wrong; {seen.slots_checked} slots, "
        f"{seen.slots_wrong} wrong; grown by {result['grown']} MiB"
    )
    return result


def told(
    args: argparse.Namespace, config: runtime.EngineConfig, seen: Outcome, began: float
) -> dict[str, object]:
    """The result, so far as it is known."""
    return {
        "machine": machine(),
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)),
        "config": asdict(config),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "minutes": args.minutes,
        "grown": {
            "ram_mib": growth(seen.looks, "ram_mib", without_slots=args.device_in_ram),
            "vram_mib": growth(seen.looks, "vram_mib", without_slots=True),
        },
        **asdict(seen),
    }


async def clients(
    engine: runtime.Engine,
    args: argparse.Namespace,
    work: list[Request],
    expected: list[list[int]],
    seen: Outcome,
    save: Callable[[], object],
) -> None:
    """Let clients, resizes and looks run until the time is over."""
    until = time.perf_counter() + 60 * args.minutes
    with ExitStack() as resources:
        cache = cache_of(engine)
        gpu = None if args.device == "cpu" else resources.enter_context(GPUMemory())
        check = None if cache is None else resources.enter_context(SlotCheck(engine, cache))
        async with asyncio.TaskGroup() as tasks:
            for i in range(args.streams + 2):  # two always wait for a place
                rng = random.Random(args.seed + i)
                tasks.create_task(client(engine, work, expected, until, args.phase, seen, rng))
            rng = random.Random(args.seed)
            tasks.create_task(watch(engine, until, gpu, check, seen, rng, save))
            tasks.create_task(resize(engine, args.resize, until, args.phase, seen))


def main(argv: list[str]) -> int:
    """Soak, print, write the result file if one is named; 1 if a token was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file; default the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer, fewer")
    parser.add_argument("--a-topic", type=int, default=8, help="requests of a topic")
    parser.add_argument("--phase", type=float, default=20.0, help="seconds of a topic")
    parser.add_argument("--vram-limit", type=float, help="GiB of each GPU")
    parser.add_argument("--cache", type=int, default=-1, help="experts of a layer in VRAM")
    parser.add_argument(
        "--resize", type=int, nargs="*", default=[], help="experts of a layer, taken in turn"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--device-in-ram", action="store_true", help="the GPU's memory is this process' (tests)"
    )
    args = parser.parse_args(argv)
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    result = asyncio.run(soak(args))
    return int(bool(result["wrong"] or result["slots_wrong"]))
