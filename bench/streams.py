"""Prompt and decode speed through the engine, of one and of several streams, with expert hits.

    python -m bench streams model.gguf --device cuda --streams 1,8 --cache 64 --out result.json

Token ids are asked for and given, so a file without a tokenizer will do. Each count of streams runs
four times: the first one captures graphs and fills the expert cache, the second one counts. The
other two, some of whose steps keep times, give the parts of a step (docs/profiling.md); the last
one does not run ahead, so the loop's own work stands between its steps, where it is seen: what
`host_us` names, scheduling, control blocks, choosing, text and the callers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import runtime
from bench.machine import machine

FIRST_ID = 5


class Parts(runtime.Instrument):
    """Where the time of decode steps went, us of each part of each step that kept times."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}

    def step_ended(self, record: runtime.StepRecord) -> None:
        if record.sort == "decode" and record.timed and not record.fresh:
            for part, seconds in record.parts.items():
                self.us.setdefault(str(part), []).append(1e6 * seconds)

    @property
    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(us), 1) for name, us in self.us.items()}


@dataclass(frozen=True)
class Stream:
    """One stream: seconds to its first token and, on average, to each other one; when each came."""

    prompt_seconds: float
    token_seconds: float
    ids: list[int]
    times: list[float]


async def stream(engine: runtime.Engine, n_prompt: int, n_tokens: int, offset: int) -> Stream:
    """Generate greedily after a prompt of counting ids that no other stream has."""
    n_vocab = engine.model.n_vocab
    prompt = [(FIRST_ID + offset + i) % n_vocab for i in range(n_prompt)]
    params = runtime.SamplingParams.greedy(max_tokens=n_tokens, ignore_eos=True)
    began, times, ids = time.perf_counter(), list[float](), list[int]()
    async for token in engine.generate(prompt, params, reuse_prefix=False):
        times.append(time.perf_counter())
        if token.id is not None:
            ids.append(token.id)
    token_seconds = (time.perf_counter() - times[0]) / max(len(ids) - 1, 1)
    return Stream(times[0] - began, token_seconds, ids, times)


def step_seconds(streams: Sequence[Stream]) -> float:
    """Of a decode step with all streams in it: from the last one's first token to an end."""
    first = max(s.times[0] for s in streams)
    last = min(s.times[-1] for s in streams)
    n_steps = sum(first < at <= last for s in streams for at in s.times) / len(streams)
    return (last - first) / n_steps if n_steps else 0.0


async def together(
    engine: runtime.Engine, n_streams: int, n_prompt: int, n_tokens: int
) -> dict[str, object]:
    """Run the streams four times; see the module."""

    async def once() -> list[Stream]:
        offsets = range(0, n_streams * n_prompt, n_prompt)
        return await asyncio.gather(
            *(stream(engine, n_prompt, n_tokens, offset) for offset in offsets)
        )

    await once()
    before = _experts(engine)
    streams = await once()
    used = {key: n - before.get(key, 0) for key, n in _experts(engine).items()}
    ahead, alone = Parts(), Parts()
    with attached(engine, ahead):
        await once()
    with attached(engine, alone), one_step_at_a_time(engine):
        await once()
    seconds = step_seconds(streams)
    return {
        "streams": n_streams,
        "prompt_tokens": n_prompt,
        "tokens": n_tokens,
        "prompt_tokens_per_second": n_prompt * n_streams / max(s.prompt_seconds for s in streams),
        "tokens_per_second": n_streams / seconds if seconds else 0.0,
        "us_a_step": 1e6 * seconds,
        "prompt_seconds": [round(s.prompt_seconds, 4) for s in streams],
        "token_us": [round(1e6 * s.token_seconds, 1) for s in streams],
        "host_us": sum(alone.medians.get(part, 0.0) for part in ("host", "sampling")),
        "parts_us": ahead.medians,
        "parts_us_of_steps_alone": alone.medians,
        "experts": used,
    }


@contextmanager
def attached(engine: runtime.Engine, instrument: runtime.Instrument) -> Iterator[None]:
    engine.attach(instrument)
    try:
        yield
    finally:
        engine.detach(instrument)


@contextmanager
def one_step_at_a_time(engine: runtime.Engine) -> Iterator[None]:
    """Inside, no step begins before the one before it has ended."""
    kind = type(engine.executor)
    if not hasattr(kind, "runs_ahead"):
        yield
        return
    with mock.patch.object(kind, "runs_ahead", False):
        yield


def _experts(engine: runtime.Engine) -> dict[str, int]:
    """The counters of the expert cache, where there is one."""
    facts = engine.executor.describe()
    names = ("hits", "cpu_misses", "in_place_reads", "fetched", "uploads")
    found = {name: facts.get(f"expert_{name}") for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Open the engine as asked and run every count of streams."""
    counts = [int(n) for n in args.streams.split(",")]
    config = runtime.EngineConfig(
        model=args.model,
        device=args.device,
        n_ctx=(args.prompt + args.tokens + 1) * max(counts),
        n_parallel=max(counts),
        vram_limit=args.vram_limit,
        moe_expert_cache=args.cache,
    )
    async with runtime.open_engine(config) as engine:
        rows = []
        for n in counts:
            row = await together(engine, n, args.prompt, args.tokens)
            rows.append(row)
            print(
                f"{n:3} streams: prompt {row['prompt_tokens_per_second']:9.1f} t/s, decode "
                f"{row['tokens_per_second']:9.1f} t/s, {row['us_a_step']:8.0f} us a step "
                f"host {row['host_us']:.0f} us, {row['parts_us']} {row['experts']}",
                flush=True,
            )
        facts = engine.executor.describe()
    return {
        "machine": {**machine(), "gpu": facts.get("gpu")},
        "config": asdict(config),
        "executor": facts,
        "rows": rows,
    }


def main(argv: list[str]) -> int:
    """Measure, print, and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench streams", description=__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file; default the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", default="1,8", help="counts, separated by commas")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated by each stream")
    parser.add_argument("--vram-limit", type=float, help="GiB of each GPU")
    parser.add_argument("--cache", type=int, default=-1, help="experts of a layer in VRAM")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    # What earlier runs used must not fill the cache of this one.
    os.environ["LLAMA_MOE_CACHE_PROFILE"] = "0"
    result = asyncio.run(measure(args))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0
