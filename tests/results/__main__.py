"""Which kernels no GPU has run in their present text: `python -m tests.results --missing`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.expert import GPU_FORMATS, TEAMS, RowLaunch, expert_down, expert_gate_up
from ops.kernel import Kernel
from ops.quantize import quantize
from ops.quants import FORMATS

FOLDER = Path(__file__).parent


def rows() -> Iterator[dict[str, Any]]:
    """Every recorded row."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Every kernel that is used, with a name that tells its variants apart."""
    yield "quantize_q8_256", quantize("q8_256")
    yield "quantize_q8_32", quantize("q8_32")
    for name in GPU_FORMATS:
        for team in TEAMS:
            for overlapped in (False, True):
                launch = RowLaunch(team, overlapped=overlapped)
                variant = f"team {team}{', overlapped' if overlapped else ''}"
                for make in (expert_gate_up, expert_down):
                    kernel = make(FORMATS[name], launch)
                    yield f"{kernel.entry} ({variant})", kernel


def missing() -> list[str]:
    """The kernels whose present text has no row with equal bits."""
    seen = {row["text_hash"] for row in rows() if row.get("bits_equal")}
    return [name for name, kernel in kernels() if kernel.text_hash not in seen]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.results", description=__doc__)
    parser.add_argument("--missing", action="store_true", help="list kernels no GPU has run")
    parser.parse_args()
    names = missing()
    sys.stdout.writelines(f"not yet seen on a GPU: {name}\n" for name in names)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
