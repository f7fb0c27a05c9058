"""Which kernels no GPU has run in their present text: `python -m tests.results --missing`."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.gpu.catalog import every_kernel
from runtime.cuda.device import Device
from runtime.cuda.driver import open_driver
from runtime.errors import DeviceLost, EngineError
from tests.support.cases import every_case
from tests.support.machines import DeviceMachine, DoesNotFit

FOLDER = Path(__file__).parent


def rows() -> Iterator[dict[str, Any]]:
    """Every recorded row."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def missing() -> list[str]:
    """The kernels that have no passing row."""
    seen = {row["proof_hash"] for row in rows() if row["passed"]}
    return [name for name, kernel in every_kernel() if kernel.proof_hash not in seen]


def record(folder: Path, source: str) -> list[str]:
    """Run the cases of the kernels in ptx/`source`.ptx ('': all) on the first GPU; what failed.

    Rows of other kernels in the file stay, if their kernels are still what they were.
    """
    names = {kernel.proof_hash: name for name, kernel in every_kernel()}
    failed = []
    with Device(open_driver()) as device:
        machine = DeviceMachine(device)
        path = folder / f"{re.sub(r'[^a-z0-9]+', '-', device.info.name.lower())}.jsonl"
        facts = {
            "device": device.info.name,
            "driver": device.driver.version,
            "date": datetime.date.today().isoformat(),
        }
        new: list[dict[str, Any]] = []
        for case in every_case():
            proof = case.kernel.proof_hash
            if proof not in names or source not in ("", case.kernel.source.removesuffix(".ptx")):
                continue
            row = {"kernel": names[proof], "case": case.name}
            try:
                outcome = case.run(machine)
            except DoesNotFit:
                continue
            except DeviceLost as error:
                failed.append(f"{names[proof]}, {case.name}: {error}")
                break  # nothing runs on this device any more
            except EngineError as error:
                failed.append(f"{names[proof]}, {case.name}: {error}")
                continue
            finally:
                machine.clear()
            row |= {"passed": outcome.passed, "compared": outcome.result.size}
            row |= {"max_error": outcome.max_error, "proof_hash": proof, **facts}
            new.append(row)
            if not outcome.passed:
                failed.append(f"{names[proof]}, {case.name}: off by {outcome.max_error}")
    replaced = {(row["kernel"], row["case"]) for row in new}
    kept = [
        row
        for row in rows()
        if row["device"] == facts["device"]
        and row["proof_hash"] in names
        and (row["kernel"], row["case"]) not in replaced
    ]
    lines = [json.dumps(row) + "\n" for row in kept + new]
    path.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{len(new)} cases run, {len(failed)} failed\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.results", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--missing", action="store_true", help="list kernels no GPU has run")
    action.add_argument("--record", action="store_true", help="run all cases on the first GPU")
    parser.add_argument("--source", default="", help="with --record: kernels of this file alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with --record: where to write")
    options = parser.parse_args()
    if options.missing:
        lines = [f"not yet seen on a GPU: {name}\n" for name in missing()]
    else:
        lines = [f"failed: {line}\n" for line in record(options.folder, options.source)]
    sys.stdout.writelines(lines)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
