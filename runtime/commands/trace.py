"""Where the time went, by a trace that an engine wrote with GGML_SCHED_PROF=FILE.json.

The same file opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.profiling.summary import Account, Accounts
from runtime.profiling.trace_file import STEPS, records_in, track_seconds

WIDTH = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a trace, as JSON")


def run(settings: argparse.Namespace) -> int:
    accounts = Accounts.of(records_in(settings.file))
    if not accounts.held:
        print("the trace has no steps")
    for account in accounts.held:
        print("\n".join(table(account)))
    for track, names in track_seconds(settings.file).items():
        if track != STEPS:
            longest = sorted(names.items(), key=lambda item: -item[1])
            print(f"{track}: " + ", ".join(f"{n} {1e3 * s:.3f} ms" for n, s in longest))
    return 0


def table(account: Account) -> list[str]:
    """The account's line, then a line for each part with its share."""
    head, *_ = account.line().split("; ")
    lines = [head]
    if account.n_timed:
        lines.append(f"  of {account.n_timed} timed steps, each:")
    for part, seconds in account.parts.items():
        ms = 1e3 * seconds / account.n_timed
        share = 100 * seconds / account.timed_seconds
        lines.append(f"  {part.value:{WIDTH}}{ms:10.3f} ms {share:5.1f} %")
    return lines
