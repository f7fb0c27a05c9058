"""What a change did to speed and text: the working tree beside the last tag, or another revision.

    python -m bench regress --rounds 5
    python -m bench regress --against HEAD --model olmoe.gguf --device cuda

The other revision is unpacked into a folder that is deleted afterwards; the repository itself is
only read. Both run the same fixed inputs as whole processes in turn; changes are medians over pairs
of neighbouring runs, because shared machines drift.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import machine

ROOT = Path(__file__).parents[1]
INPUTS = Path(__file__).with_name("regress_inputs.py")
Runs = Sequence[dict[str, Any]]


def main(argv: list[str]) -> int:
    """Compare, print the change of every input; 1 where texts differ."""
    parser = argparse.ArgumentParser(prog="python -m bench regress", description=__doc__)
    parser.add_argument("--against", help="a revision; default the last tag, else the last commit")
    parser.add_argument("--model", help="GGUF file; default the bundled model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the working tree")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    revision = args.against or last_revision(args.root)
    settings = {"model": args.model and str(Path(args.model).resolve()), "device": args.device}
    with tempfile.TemporaryDirectory(prefix="regress-") as folder:
        unpack(args.root, revision, Path(folder))
        before, after = interleaved([Path(folder), args.root], settings, args.rounds)
    rows = changes(before, after)
    for row in rows:
        same = "same text" if row["same_text"] else "OTHER TEXT"
        print(
            f"{row['input']:14} {row['before']:10.1f} -> {row['after']:10.1f} t/s "
            f"{100 * (row['ratio'] - 1):+6.1f} %   {same}"
        )
    if args.out:
        report = {"machine": machine(), "against": revision, "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(row["same_text"] for row in rows))


def last_revision(root: Path) -> str:
    """The last tag before what is checked out; without tags what is checked out."""
    command = ["git", "describe", "--tags", "--abbrev=0"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "HEAD"


def unpack(root: Path, revision: str, folder: Path) -> None:
    """Put the files of a revision into `folder`.

    Raises: CalledProcessError for a revision that does not exist.
    """
    command = ["git", "archive", "--format=tar", revision]
    packed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def interleaved(trees: Sequence[Path], settings: dict[str, Any], n_rounds: int) -> list[Runs]:
    """Each tree's runs: one of each in turn, after one that does not count."""
    runs: list[list[dict[str, Any]]] = [[] for _ in trees]
    for n in range(n_rounds + 1):
        for tree, found in zip(trees, runs, strict=True):
            result = run_inputs(tree, settings)
            if n:
                found.append(result)
    return list(runs)


def run_inputs(tree: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The fixed inputs on one tree, in a process of its own.

    Raises: CalledProcessError.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "LLAMA_MOE_CACHE_PROFILE": "0"}
    command = [sys.executable, str(INPUTS), json.dumps(settings)]
    done = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def changes(before: Runs, after: Runs) -> list[dict[str, Any]]:
    """Of every input: medians, the median of paired ratios, all runs."""
    rows = []
    for name in after[0]:
        pairs = [
            (a[name]["tokens_per_second"], b[name]["tokens_per_second"])
            for a, b in zip(before, after, strict=True)
        ]
        texts = {run[name]["md5"] for run in (*before, *after)}
        rows.append(
            {
                "input": name,
                "before": statistics.median(a for a, _ in pairs),
                "after": statistics.median(b for _, b in pairs),
                "ratio": statistics.median(b / a for a, b in pairs),
                "same_text": len(texts) == 1,
                "runs": [[round(a, 2), round(b, 2)] for a, b in pairs],
            }
        )
    return rows
