"""Routing lab: recorded or synthetic routing, replayed through policies of the expert cache.

    python -m bench routing local-128 chat.trace --slots 10,25,50 --machine desktop

A trace is a file of `hotexpert routing` or the name of a synthetic router; files joined by + are
one text after the other, and every name:N cuts them into pieces of N tokens that take turns.
Prompt tokens count as if they had been generated, unless --phases is given.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from bench.machine import machine
from bench.routing import restart
from bench.routing.bounds import belady_hits
from bench.routing.contenders import CONTENDERS
from bench.routing.rates import MACHINES, Rates
from bench.routing.replay import replay, shared_slots
from bench.routing.report import Case, plot, summary, table
from bench.routing.synthetic import ROUTERS, synthetic_trace
from profiles import RoutingTrace, join, load_trace

WARM_UP = 256


def main(argv: list[str]) -> int:
    """Replay every trace with every number of slots; print tables, write files."""
    parser = argparse.ArgumentParser(
        prog="python -m bench routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="*", default=list(ROUTERS), help="files or synthetic names")
    parser.add_argument("--slots", default="10,25,50", help="percent of the experts")
    parser.add_argument("--machine", choices=MACHINES, default="desktop")
    parser.add_argument("--rates", help="cpu,link,vram,dram in GB/s, dense ms, hand-over us")
    parser.add_argument("--policy", action="append", choices=CONTENDERS, help="only these")
    parser.add_argument("--tokens", type=int, default=2000, help="of a synthetic trace")
    parser.add_argument("--uploads", type=int, default=32, help="started a step at most")
    parser.add_argument(
        "--restarts", help="tokens after which the cache begins anew, with commas: what it costs"
    )
    parser.add_argument("--phases", action="store_true", help="prompts as recorded")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    parser.add_argument("--plot", type=Path, help="folder for an SVG of each trace")
    args = parser.parse_args(argv)
    rates = MACHINES[args.machine]
    if args.rates:
        rates = Rates(*(float(number) for number in args.rates.split(",")))
    names = args.policy or list(CONTENDERS)
    shares = [float(percent) / 100 for percent in args.slots.split(",")]
    if args.restarts:
        return restart.report(args, rates, shares, trace_of, label_of)
    cases = []
    for name in args.trace:
        trace = trace_of(name, args.tokens, phases=args.phases)
        label = name if name in ROUTERS else label_of(name)
        found = [compare(label, trace, share, rates, names, args.uploads) for share in shares]
        for case in found:
            print("\n".join(table(case)), flush=True)
        if args.plot:
            args.plot.mkdir(parents=True, exist_ok=True)
            (args.plot / f"{label}.svg").write_text(plot(found, names[:6]))
        cases += found
    print("\n".join(summary(cases)))
    if args.out:
        args.out.write_text(json.dumps(result(cases, rates, args.uploads), indent=1) + "\n")
    return 0


def trace_of(name: str, n_tokens: int, *, phases: bool = False) -> RoutingTrace:
    """A synthetic trace, or those of files joined by +, in turns of N tokens after name:N."""
    if name in ROUTERS:
        return synthetic_trace(name, n_tokens)
    files, _, turn = name.partition(":")
    traces = [load_trace(Path(file)) for file in files.split("+")]
    if not phases:
        traces = [trace.token_by_token() for trace in traces]
    if not turn:
        return join(traces)
    n, most = int(turn), max(trace.n_tokens for trace in traces)
    pieces = [t.token_by_token(i, i + n) for i in range(0, most, n) for t in traces]
    return join([piece for piece in pieces if piece.n_tokens])


def label_of(name: str) -> str:
    """What to call the trace of some files."""
    files, _, turn = name.partition(":")
    return "+".join(Path(file).stem for file in files.split("+")) + (f"-{turn}" if turn else "")


def compare(
    label: str, trace: RoutingTrace, share: float, rates: Rates, names: list[str], uploads: int
) -> Case:
    """All contenders on a trace with slots for a share of its experts."""
    outcomes = {}
    for name in names:
        contender = CONTENDERS[name]
        outcomes[name] = replay(
            trace,
            contender.slots(trace, share),
            rates,
            contender.make(rates),
            warm_up=WARM_UP,
            most_uploads=uploads,
        )
    return Case(label, share, bound(trace, share), outcomes)


def bound(trace: RoutingTrace, share: float) -> float:
    """Belady's hit rate of the tokens after the warm-up."""
    slots, hits = shared_slots(trace, share), 0
    for size_class, n_slots in slots.per_class.items():
        layers = [layer for layer, c in enumerate(slots.classes) if c == size_class]
        hits += belady_hits(trace, layers, n_slots, WARM_UP)
    return hits / max(int((trace.choices[WARM_UP:] >= 0).sum()), 1)


def result(cases: list[Case], rates: Rates, uploads: int) -> dict[str, object]:
    """What a result file holds."""
    rows = [
        {
            "trace": case.trace,
            "slots": case.share,
            "belady_hit_rate": round(case.bound, 4),
            "policies": {
                name: {
                    "ms_per_token": round(outcome.ms_per_token, 3),
                    "hit_rate": round(outcome.hit_rate, 4),
                    "mb_per_token": round(
                        outcome.uploaded_bytes / max(outcome.n_tokens, 1) / 1e6, 2
                    ),
                    "policy_us": round(outcome.policy_us, 1),
                }
                for name, outcome in case.outcomes.items()
            },
        }
        for case in cases
    ]
    return {"machine": machine(), "rates": asdict(rates), "uploads": uploads, "cases": rows}
