"""Models on a GPU beside llama.cpp, with the same share of the experts in its memory.

    python -m bench versus_gpu qwen3-30b-a3b:48 --llama-bench bin/llama-bench --residency 25,50
    python -m bench versus_gpu glm-5.3-flash:5 --llama-bench bin/llama-bench --limits 22,44

Whole processes in turn, theirs and ours (`python -m bench hybrid`), so many times; ratios are of
neighbouring runs. Theirs has the experts of whole layers on the GPU (`-ncmoe`), ours a cache of as
many experts. Of a file with all of its layers theirs runs with the layers that fit. Of some layers
of a larger model theirs runs with the experts of all of them on the GPU, then of none, and both
programs' speed of the whole model is reckoned: layers times the time of one, the output matrix
once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agree import model_file
from bench.machine import machine
from bench.synthetic import MODELS
from runtime.models import open_model
from runtime.models.sizes import ModelSizes, model_sizes

ALL = 999
"""More layers than any model has."""


@dataclass(frozen=True)
class Layers:
    """Of the file, and of the model that it is a part of.

    moe      layers with routed experts in the file
    experts  routed experts of all of them
    """

    file: int
    moe: int
    whole: int
    experts: int
    output_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.file == self.whole


def main(argv: list[str]) -> int:
    """Run both in turn, print a line for each point and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench versus_gpu", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--llama-bench", required=True, help="path of llama.cpp's llama-bench")
    parser.add_argument("--limits", help="GiB of the GPU's memory, with commas")
    parser.add_argument("--residency", help="percent of the experts that have room, with commas")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens that are timed")
    parser.add_argument("--threads", type=int, help="of theirs; default as it has it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if not (args.limits or args.residency):
        parser.error("give --limits or --residency")
    path = model_file(args.model, args.folder)
    layers = layers_of(path, args.model.partition(":")[0])
    rounds: list[dict[str, Any]] = []
    placed: list[int] = [0, ALL]
    for _ in range(args.rounds):
        if rounds or not layers.is_whole:
            rounds.append({"theirs": theirs(path, placed, args), "ours": ours(args)})
        else:  # how much fits is known from ours
            first = ours(args)
            placed = [on_cpu(row, layers) for row in first]
            rounds.append({"ours": first, "theirs": theirs(path, placed, args)})
    points = [point(rounds, i, layers) for i in range(len(rounds[0]["ours"]))]
    for row in points:
        print(json.dumps(row), flush=True)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items() if k not in ("llama_bench", "folder")}
        report = {"machine": machine(), "settings": settings, "points": points, "rounds": rounds}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def layers_of(path: Path, name: str) -> Layers:
    """Raises: ModelError."""
    with open_model(path) as model:
        sizes: ModelSizes = model_sizes(model.spec, model.file.tensors)
    n_file = len(sizes.layers)
    n_whole = MODELS[name].n_layers if name in MODELS else n_file
    experts = [layer.n_expert for layer in sizes.layers if layer.n_expert]
    return Layers(n_file, len(experts), n_whole, sum(experts), sizes.output_bytes)


def ours(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of `python -m bench hybrid`, one a limit or residency."""
    size = ["--residency", args.residency] if args.residency else ["--limits", args.limits]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "hybrid.json"
        command = [sys.executable, "-m", "bench", "hybrid", args.model, *size, "--modes", "cache"]
        command += ["--prompt", str(args.prompt), "--tokens", str(args.tokens), "--alone", "8"]
        command += ["--folder", str(args.folder), "--out", str(out)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def theirs(path: Path, on_cpu: Sequence[int], args: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens a second of llama-bench's two tests, with the experts of so many layers on the CPU."""
    command = [args.llama_bench, "-m", str(path), "-ngl", "99", "-fa", "1", "-o", "json", "-r", "1"]
    command += ["-ncmoe", ",".join(str(n) for n in dict.fromkeys(on_cpu)), "-ub", "2048"]
    command += ["-p", str(args.prompt), "-n", str(args.tokens)]
    command += ["-t", str(args.threads)] if args.threads else []
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [{"on_cpu": float(n)} for n in on_cpu]
    for row in json.loads(out):
        test = "prompt" if row["n_prompt"] else "decode"
        for speeds in found:  # several points may have room for as many layers
            if speeds["on_cpu"] == row["n_cpu_moe"]:
                speeds[test] = row["avg_ts"]
    return found


def share(row: dict[str, Any], layers: Layers) -> float:
    """Of the routed experts that ours has room for."""
    return float(row["slots"]) / layers.experts if layers.experts else 1.0


def on_cpu(row: dict[str, Any], layers: Layers) -> int:
    """Layers of the file whose experts have no room in as much memory."""
    n_resident = int(share(row, layers) * layers.moe)
    return 0 if n_resident == layers.moe else layers.file - n_resident


def point(rounds: Sequence[dict[str, Any]], i: int, layers: Layers) -> dict[str, Any]:
    """Medians of the i-th limit or residency, of whole models; ratios of the rounds' pairs."""
    pairs = [speeds_of(found, i, layers) for found in rounds]
    row = rounds[0]["ours"][i]
    told = {
        k: row[k] for k in ("limit_gib", "residency", "slots", "hit_rate", "layers") if k in row
    }
    for test in ("decode", "prompt"):
        both = [(mine[test], other[test]) for mine, other in pairs]
        told[test] = {
            "ours": [round(a, 2) for a, _ in both],
            "llama_cpp": [round(b, 2) for _, b in both],
            "ratio": round(statistics.median(a / b for a, b in both), 3),
        }
    return told


def speeds_of(
    found: dict[str, Any], i: int, layers: Layers
) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens a second of the whole model: ours, theirs."""
    row = found["ours"][i]
    mine = {
        "decode": row["whole_model_tokens_per_second"],
        "prompt": row["whole_model_prompt_tokens_per_second"],
    }
    if layers.is_whole:
        return mine, found["theirs"][i]
    on_gpu, without = found["theirs"]
    held = int(share(row, layers) * layers.whole) / layers.whole
    output = layers.output_bytes / (1e9 * row["read_gb_per_s"]["gpu"])
    seconds = {
        test: held / on_gpu[test] + (1 - held) / without[test] for test in ("decode", "prompt")
    }
    grown = layers.whole / layers.file
    decode = output + (seconds["decode"] - output) * grown
    return mine, {"decode": 1 / decode, "prompt": 1 / (seconds["prompt"] * grown)}
