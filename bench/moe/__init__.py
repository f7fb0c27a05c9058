"""Engines side by side on two workloads: a 1500-token reply, and a 12,000-token prompt.

    python -m bench moe model.gguf --engine ours=device=cuda --engine theirs=http://localhost:8081
    python -m bench moe model.gguf --engine all=moe_expert_cache=-1 --engine few=moe_expert_cache=8

Each `--engine NAME=WHAT` is ours inside this process, WHAT being settings, or a server's address.
All of them are open at once and answer in turn; ratios are of neighbouring runs, against the first.
Texts are greedy: their md5 has to be the same for all settings of one engine on one machine. Where
ours has missed experts, the share of the bound T_s is printed too (bench/bounds.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import machine
from bench.moe.engines import Answer, Contender, open_contender
from bench.moe.workloads import Workload, workloads

Rounds = Mapping[str, Sequence[Answer]]


def main(argv: list[str]) -> int:
    """Compare; 1 where engines of ours gave different texts."""
    parser = argparse.ArgumentParser(prog="python -m bench moe", description=__doc__)
    parser.add_argument("model", nargs="?", help="GGUF file of ours; default the bundled model")
    parser.add_argument("--engine", action="append", help="NAME=SETTINGS or NAME=URL; default ours")
    parser.add_argument("--workloads", default="chat,code")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each workload, for a look")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    engines = dict(_named(text) for text in args.engine or ["ours="])
    wanted = [w for w in workloads() if w.name in args.workloads.split(",")]
    result = asyncio.run(compare(args.model, engines, wanted, args.rounds, args.share))
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"machine": machine(), "settings": settings, **result}
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return int(not result["same_text"])


async def compare(
    model: str | None,
    engines: Mapping[str, str],
    wanted: Sequence[Workload],
    n_rounds: int,
    share: float = 1.0,
) -> dict[str, Any]:
    """Run every workload `n_rounds` times on all engines in turn, after one short run of each."""
    rows, same = [], True
    async with AsyncExitStack() as stack:
        open_engines = {
            name: await open_contender(what, model, stack) for name, what in engines.items()
        }
        for workload in wanted:
            workload = workload.shortened(share) if share < 1 else workload
            found = await _rounds(open_engines, workload, n_rounds)
            ours = [name for name, what in engines.items() if not what.startswith("http")]
            same = same and len({a.md5 for name in ours for a in found[name]}) <= 1
            for name, engine in open_engines.items():
                bound = await engine.bound(found[name][-1])
                rows.append({**row(workload, name, found), **(bound or {})})
                print(summary(rows[-1]), flush=True)
        facts = {name: await engine.describe() for name, engine in open_engines.items()}
    return {"same_text": same, "engines": facts, "rows": rows}


async def _rounds(
    engines: Mapping[str, Contender], workload: Workload, n_rounds: int
) -> dict[str, list[Answer]]:
    for engine in engines.values():
        await engine.answer(workload.shortened(0.1))
    found: dict[str, list[Answer]] = {name: [] for name in engines}
    for _ in range(n_rounds):
        for name, engine in engines.items():
            found[name].append(await engine.answer(workload))
    return found


def row(workload: Workload, name: str, found: Rounds) -> dict[str, Any]:
    """Medians of an engine's answers and, pair by pair, what they are to the first engine's."""
    first, own = next(iter(found.values())), found[name]
    pairs = list(zip(own, first, strict=True))
    return {
        "workload": workload.name,
        "engine": name,
        "prompt_tokens": own[0].n_prompt,
        "tokens": own[0].n_tokens,
        "prompt_tokens_per_second": statistics.median(a.prompt_rate for a in own),
        "tokens_per_second": statistics.median(a.token_rate for a in own),
        "prompt_ratio": statistics.median(a.prompt_rate / b.prompt_rate for a, b in pairs),
        "token_ratio": statistics.median(a.token_rate / b.token_rate for a, b in pairs),
        "hit_rate": own[-1].hit_rate,
        "md5": sorted({a.md5 for a in own}),
        "answers": [asdict(a) for a in own],
    }


def summary(line: Mapping[str, Any]) -> str:
    """A row for people."""
    hits = "" if line["hit_rate"] is None else f", {100 * line['hit_rate']:.1f} % hits"
    if "share_of_serial_bound" in line:
        hits += f", {100 * line['share_of_serial_bound']:.0f} % of T_s"
    return (
        f"{line['workload']:5} {line['engine']:12} prompt {line['prompt_tokens']:6} tokens "
        f"{line['prompt_tokens_per_second']:9.1f} t/s ({line['prompt_ratio']:.2f}x), decode "
        f"{line['tokens_per_second']:8.1f} t/s ({line['token_ratio']:.2f}x){hits}, "
        f"text {' '.join(m[:8] for m in line['md5'])}"
    )


def _named(text: str) -> tuple[str, str]:
    """NAME=WHAT, where WHAT alone may have further signs of equality."""
    name, _, what = text.partition("=")
    return name, what
