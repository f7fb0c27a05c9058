"""Prompt and decode speed beside llama.cpp: one run of each in turn, ratios pair by pair.

Both programs run as whole processes with the same file, threads and test sizes; only ratios of
neighbouring runs count, because shared machines drift.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench.machine import machine


def run_json(command: list[str]) -> dict[str, float]:
    """Run a llama-bench-like command with JSON output: {"pp512": tokens/s, "tg128": tokens/s}."""
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    speeds = {}
    for row in json.loads(out):
        name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        speeds[name] = float(row["avg_ts"])
    return speeds


def compare(ours: list[str], theirs: list[str], rounds: int) -> dict[str, object]:
    """Run both in turn `rounds` times: every speed, and the median of the paired ratios."""
    pairs = [(run_json(ours), run_json(theirs)) for _ in range(rounds)]
    return {
        test: {
            "ours": [round(a[test], 1) for a, _ in pairs],
            "llama_cpp": [round(b[test], 1) for _, b in pairs],
            "ratio": round(statistics.median(a[test] / b[test] for a, b in pairs), 3),
        }
        for test in pairs[0][0]
    }


def main(argv: list[str]) -> int:
    """Parse, compare, print a table and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench versus", description=__doc__)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--llama-bench", required=True, help="path of llama.cpp's llama-bench")
    parser.add_argument("-p", default="512")
    parser.add_argument("-n", default="128")
    parser.add_argument("-t", default="2")
    parser.add_argument("-r", default="1", help="repetitions inside a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    common = ["-p", args.p, "-n", args.n, "-t", args.t, "-r", args.r, "-o", "json"]
    results = {}
    for model in args.model:
        ours = [sys.executable, "-m", "runtime.commands", "bench", "-m", model, *common]
        theirs = [args.llama_bench, "-m", model, *common]
        results[Path(model).name] = result = compare(ours, theirs, args.rounds)
        for test, row in result.items():
            print(f"{Path(model).name:36} {test:8} {row}")
    if args.out:
        record = {"machine": machine(), "threads": int(args.t), "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0
