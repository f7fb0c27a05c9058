"""A long prompt with all experts on the GPU, or with few: speed, and the share of the link's bound.

    python -m bench prompts qwen3-30b-a3b:12 --tokens 4096 --caches=-1,0 --out result.json

Experts that the GPU does not hold cross the link once a chunk of the prompt, whoever uses them. The
bound is the time of these bytes at the rate of bare copies from pinned memory, measured in the same
run; `share` is the bound beside the prompt's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.agree import model_file
from bench.machine import machine
from bench.read_rates import link_bytes_per_second
from bench.runs import recorded_ids, run_of


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench prompts", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk of it")
    parser.add_argument("--caches", default="-1,0", help="experts of a layer in VRAM, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="times; the first one is extra")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    path = model_file(args.model, args.folder)
    rows = []
    for cache in (int(part) for part in args.caches.split(",")):
        rows.append(asyncio.run(measure(path, cache, args)))
        row = rows[-1]
        print(
            f"{row['experts']}: {row['tokens_per_second']:.0f} tokens/s, link bound "
            f"{row['link_tokens_per_second'] or 0:.0f} ({row['share'] or 0:.0%})",
            flush=True,
        )
    if args.out:
        report = {
            "machine": {**machine(), "gpu": rows[0]["gpu"]},
            "settings": {name: str(value) for name, value in vars(args).items()},
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


async def measure(path: Path, cache: int, args: argparse.Namespace) -> dict[str, Any]:
    """The prompt's times with so many experts of a layer on the GPU."""
    settings = {"n_batch": args.chunk, "moe_expert_cache": cache}
    times = []
    async with run_of(path, "cuda", 1, args.tokens, **settings) as run:
        text = recorded_ids(args.tokens, run.limits.n_vocab)
        for _ in range(args.repeats + 1):
            began = time.perf_counter()
            await run.prompt(0, text, 0, args.tokens)
            times.append(time.perf_counter() - began)
        executor: Any = run.executor
        facts = executor.describe()
        held, n_bytes = run.experts(), 0
        if held is not None:
            missing = ~(held.cache.resident | held.cache.coming)
            n_bytes = int(sum(missing.sum(axis=1) * held._expert_bytes))
        device = executor._parts.stream.device
        rate = await asyncio.to_thread(link_bytes_per_second, device)
    seconds = float(np.median(times[1:]))
    n_chunks = -(-args.tokens // args.chunk)
    bound = n_chunks * n_bytes / rate
    return {
        "gpu": facts.get("gpu"),
        "experts": facts.get("experts", "all on the GPU"),
        "seconds": [round(t, 5) for t in times],
        "tokens_per_second": args.tokens / seconds,
        "bytes_a_chunk": n_bytes,
        "link_gb_per_s": rate / 1e9,
        "link_tokens_per_second": args.tokens / bound if bound else None,
        "share": bound / seconds if bound else None,
        "executor": facts,
    }
