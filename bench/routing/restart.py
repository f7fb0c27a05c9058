"""What a restart costs the cache: the tokens after it, by what the profile keeps.

The trace is replayed in one go; at every restart an empty cache takes over as well, which begins
with nothing, with the counts of the tokens so far, or with recent use besides, and serves the same
tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.machine import machine
from bench.routing.rates import Rates
from bench.routing.replay import Run, shared_slots
from profiles import RoutingTrace
from runtime.experts.cache import ExpertCache
from runtime.experts.fitted_policy import FittedPolicy
from runtime.experts.scored_policy import PolicySettings

TOKENS, FIRST = 64, 16
"""After each restart that are compared; and of them, the first."""
NOTHING, COUNTS, RECENT = "nothing", "counts", "counts and recent use"
STEADY = "no restart"


@dataclass(frozen=True)
class After:
    """Means over the restarts: ms a token and hit rate of the `TOKENS`, and of the `FIRST`.

    slower  than without a restart, a share
    """

    ms: float
    hit_rate: float
    first_ms: float
    first_hit_rate: float
    slower: float
    first_slower: float


def compare(
    trace: RoutingTrace, share: float, rates: Rates, restarts: Sequence[int], uploads: int
) -> dict[str, After]:
    """By what the new cache begins with.  Raises: ValueError for a trace that is too short."""
    if not restarts or max(restarts) + TOKENS > trace.n_tokens:
        raise ValueError(f"restarts up to {trace.n_tokens - TOKENS} tokens are possible")
    slots = shared_slots(trace, share)

    def begun(know: Callable[[FittedPolicy], object]) -> tuple[Run, FittedPolicy, ExpertCache]:
        cache = slots.cache(trace)
        policy = FittedPolicy(cache, PolicySettings())
        know(policy)
        return Run(trace, cache, policy, rates, uploads), policy, cache

    found: dict[str, list[list[float]]] = {STEADY: [], NOTHING: [], COUNTS: [], RECENT: []}
    steady, policy, _ = begun(lambda policy: None)
    at = 0
    for restart in sorted(restarts):
        _tokens(steady, trace, at, restart)
        at = restart + TOKENS
        uses = policy.life.reshape(policy.shape).astype(np.uint64)
        n_tokens, recent = policy.n_tokens, policy.recent()
        runs = {
            STEADY: steady,
            NOTHING: begun(lambda policy: None)[0],
            COUNTS: begun(lambda policy: policy.know(uses, n_tokens))[0],  # noqa: B023
            RECENT: begun(lambda policy: policy.know(uses, n_tokens, recent))[0],  # noqa: B023
        }
        for name, run in runs.items():
            rows = [_tokens(run, trace, restart, restart + FIRST)]
            rows.append(_tokens(run, trace, restart + FIRST, at))
            found[name].append([*rows[0], *(sum(both) for both in zip(*rows, strict=True))])
    means = {name: np.mean(rows, axis=0).tolist() for name, rows in found.items()}
    first_steady, _, _, steady_ms, _, _ = means[STEADY]
    return {
        name: After(
            ms / TOKENS,
            hits / uses,
            first_ms / FIRST,
            first_hits / first_uses,
            ms / steady_ms - 1,
            first_ms / first_steady - 1,
        )
        for name, (first_ms, first_hits, first_uses, ms, hits, uses) in means.items()
    }


def _tokens(run: Run, trace: RoutingTrace, first: int, last: int) -> list[float]:
    """Replays these; milliseconds, hits, uses."""
    before = run.outcome()
    for token in range(first, last):
        choices = trace.choices[token : token + 1].transpose(1, 0, 2)
        run.step(np.ascontiguousarray(choices), counted=True)
    after = run.outcome()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return [after.ms - before.ms, float(hits), float(hits + misses)]


def lines(label: str, share: float, found: dict[str, After]) -> Iterator[str]:
    """For the terminal."""
    yield f"{label}, {100 * share:g} % of the experts in slots: {TOKENS} tokens ({FIRST} first)"
    for name, after in found.items():
        yield (
            f"  {name:22} {after.ms:8.2f} ms {after.slower:+7.1%} {after.hit_rate:7.1%} hits   "
            f"({after.first_ms:8.2f} {after.first_slower:+7.1%} {after.first_hit_rate:7.1%})"
        )


def report(
    args: argparse.Namespace,
    rates: Rates,
    shares: Sequence[float],
    trace_of: Callable[[str, int], RoutingTrace],
    label_of: Callable[[str], str],
) -> int:
    """What `--restarts` does: all traces with all numbers of slots; the file if one is named."""
    restarts = [int(number) for number in args.restarts.split(",")]
    rows: list[dict[str, object]] = []
    for name in args.trace:
        trace = trace_of(name, max(restarts) + TOKENS)
        fitting = [restart for restart in restarts if restart + TOKENS <= trace.n_tokens]
        for share in shares:
            found = compare(trace, share, rates, fitting, args.uploads)
            label = label_of(name)
            print("\n".join(lines(label, share, found)), flush=True)
            after = {begun: asdict(each) for begun, each in found.items()}
            rows.append({"trace": label, "slots": share, "restarts": fitting, "after": after})
    if args.out:
        result = {"machine": machine(), "rates": asdict(rates), "uploads": args.uploads}
        args.out.write_text(json.dumps({**result, "cases": rows}, indent=1) + "\n")
    return 0
