"""Prompts of models whose experts exceed the GPU's memory, beside what the link could do.

    python -m bench streamed glm-5.3-flash:5 mimo-v2.6-flash:4 --limits 22,44 --out result.json

NAME:LAYERS is a file of that shape with so many of its layers, written first; it gets as many slots
a layer, and chunks as long, as the engine's plan gives the whole model on a GPU of so many GiB.
A chunk has the experts that are not on the GPU cross the link once: the bound is their bytes at the
rate of a bare copy, the share is that bound's part of the time. `resident` has every expert on the
GPU. A whole model's speed is reckoned from the layers that ran, all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from bench.agree import model_file
from bench.machine import machine
from bench.read_rates import link_bytes_per_second
from bench.runs import Run, recorded_ids, run_of
from bench.synthetic import MODELS
from bench.whole_model import Held, held
from runtime.models import open_model

RESIDENT = "resident"
DECODED = 16
"""Tokens behind the last prompt, so that the room for them is real."""


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench streamed", description=__doc__)
    parser.add_argument("models", nargs="+", help="NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--limits", default="22,44", help=f"GiB, with commas; or `{RESIDENT}`")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="times that it is read")
    parser.add_argument("--n-batch", type=int, help="tokens of a chunk; default as planned")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for model in args.models:
        path = model_file(model, args.folder)
        for limit in args.limits.split(","):
            row = {"model": model, **asyncio.run(measure(path, model, limit, args))}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"machine": machine(), "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


async def measure(path: Path, model: str, limit: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model with one limit."""
    name, n_text = model.partition(":")[0], args.prompt + DECODED
    plan = None if limit == RESIDENT else held(MODELS[name], float(limit), n_text, args.n_batch)
    settings = {"n_batch": args.n_batch} if plan is None else settings_of(plan)
    began = time.perf_counter()
    async with run_of(path, "cuda", 1, n_text, **settings) as run:
        opened = time.perf_counter() - began
        text = recorded_ids(n_text, run.limits.n_vocab)
        times, fetched = [], []
        for _ in range(args.repeats + 1):  # the first one captures graphs
            before, began = fetched_bytes(run), time.perf_counter()
            await run.prompt(0, text, 0, args.prompt)
            times.append(time.perf_counter() - began)
            fetched.append(fetched_bytes(run) - before)
        device = run.executor._parts.stream.device  # type: ignore[attr-defined]
        link = await asyncio.to_thread(link_bytes_per_second, device)
        facts = run.executor.describe()
    with open_model(path) as opened_model:
        n_layers = len(opened_model.spec.layers)
    return {
        "limit_gib": limit,
        "whole_model": str(plan),
        "opened_seconds": round(opened, 2),
        "layers": f"{n_layers} of {MODELS[name].n_layers}",
        "prompt": args.prompt,
        **speeds(args.prompt, times[1:], fetched[-1], link, n_layers / MODELS[name].n_layers),
        "seconds": [round(t, 4) for t in times],
        "experts": facts.get("experts"),
        "gpu": facts.get("gpu"),
    }


def settings_of(plan: Held) -> dict[str, Any]:
    """What gives a part of the model what the plan gives the whole one."""
    return {"moe_expert_cache": plan.slots, "n_batch": plan.n_batch}


def fetched_bytes(run: Run) -> int:
    """Bytes of experts that prompts have fetched so far."""
    experts = run.experts()
    return 0 if experts is None else int(experts.usage.fetch_bytes)


def speeds(
    n_prompt: int, seconds: list[float], fetched: int, link: float, part: float
) -> dict[str, float]:
    """Tokens a second of the median time, and beside the link's bound.

    fetched  bytes that crossed the link for one prompt;  link: bytes a second of a bare copy
    part     of the whole model's layers that ran
    """
    median = sorted(seconds)[len(seconds) // 2]
    found = {
        "tokens_per_second": round(n_prompt / median, 1),
        "whole_model_tokens_per_second": round(n_prompt / median * part, 1),
        "fetched_gb": round(fetched / 1e9, 3),
        "link_gb_per_s": round(link / 1e9, 1),
    }
    if fetched:
        bound = fetched / link
        found["link_bound_tokens_per_second"] = round(n_prompt / bound, 1)
        found["share_of_link_bound"] = round(bound / median, 3)
    return found
