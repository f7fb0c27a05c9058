"""What handing missed experts to the CPU costs a layer: exactly m of them missing in every layer.

    python -m bench exchange qwen3-30b-a3b:12 qwen3-235b-a22b:4 --out result.json

The same step of forced tokens runs again and again, so its routers choose the same experts; the
cache then holds all but some of them. By the GPU's own clock, with stamps in all graphs, in us for
each MoE layer:

    free     with mailboxes and nothing missing, over the graph of a model that is all on the GPU
    extra    with m missing experts, over the same graph with none
    hits     the experts' part of a layer without misses; the CPU works beside it
    cpu      the team, from the post to the last answer, median of the layers of the last step
    over     extra - max(0, cpu - hits): what handing over costs beyond the longer side; where cpu
             exceeds hits the hand-over is exposed, else hidden
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.agree import model_file
from bench.machine import machine
from bench.runs import Run, recorded_ids, run_of
from runtime.engine.gpu.transfer import Transfer, flat, transfer_all
from runtime.engine.step import Step
from runtime.experts.cache import NO_ROWS, Expert, ExpertCache, Rows
from runtime.profiling.record import Part

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

POSITION = 64


class Fixed:
    """A `Policy` that keeps these experts; `order`: all of each layer, those to leave out last."""

    def __init__(self, order: Sequence[Sequence[int]]) -> None:
        self.order = order

    def used(self, choices: I32) -> None:
        """Nothing follows from it."""

    def first(self, _: ExpertCache) -> Iterator[Expert]:
        for rank in range(max(len(experts) for experts in self.order)):
            for layer, experts in enumerate(self.order):
                if rank < len(experts):
                    yield layer, experts[rank]

    def swaps(self, _: ExpertCache, __: int) -> Rows:
        return NO_ROWS


class Choices:
    """A `RoutingRecorder` that keeps the last step's."""

    last: I32 = np.zeros((0, 0, 0), np.int32)

    def record(self, _: Step, choices: I32) -> None:
        self.last = choices.copy()


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench exchange", description=__doc__)
    parser.add_argument("models", nargs="+", help="GGUF files, or NAME:LAYERS")
    parser.add_argument("--misses", default="1,2,4,8", help="experts of a layer, with commas")
    parser.add_argument("--batches", default="1,8,31", help="tokens of a step, with commas")
    parser.add_argument("--threads", type=int, help="CPU workers; default one a core")
    parser.add_argument("--repeats", type=int, default=40, help="steps of each")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        found, facts = asyncio.run(measure(model_file(name, args.folder), args))
        rows += [{"model": name, **row} for row in found]
        print("\n".join(line(row) for row in rows if row["model"] == name), flush=True)
        report = {
            "machine": {**machine(), "gpu": facts.get("gpu")},
            "settings": {key: str(value) for key, value in vars(args).items()},
            "rows": rows,
        }
        if args.out:
            args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def line(row: dict[str, Any]) -> str:
    """A row, for people."""
    head = f"{row['model']:20} width {row['width']:4} batch {row['batch']:2}"
    if not row["misses"]:
        return f"{head} none missing: free {row['free_us']:6.2f} us a layer"
    kind = "exposed" if row["cpu_us"] > row["hits_us"] else "hidden"
    return (
        f"{head} misses {row['misses']}: extra {row['extra_us']:6.2f} hits {row['hits_us']:6.2f} "
        f"cpu {row['cpu_us']:6.2f} over {row['over_us']:6.2f} ({kind})"
    )


async def measure(
    path: Path, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, object]]:
    """The rows of a model, and what its executor says of itself."""
    batches = [int(part) for part in args.batches.split(",")]
    counts = [0, *(int(part) for part in args.misses.split(","))]
    most, settings = max(batches), {"n_threads": args.threads}
    whole: dict[int, Timed] = {}
    async with run_of(path, "cuda", most, POSITION + 2, **settings) as run:
        for n in batches:
            whole[n] = await timed(run, step_of(run, n), args.repeats)
        facts = run.executor.describe()
        n_expert = int(run.executor.planned.shares[0].share.model.spec.n_expert_max)  # type: ignore[attr-defined]
    rows: list[dict[str, Any]] = []
    slots = n_expert - max(counts)
    async with run_of(path, "cuda", most, POSITION + 2, moe_expert_cache=slots, **settings) as run:
        for n in batches:
            rows += await of_batch(run, n, counts, whole[n], args.repeats)
    return rows, facts


async def of_batch(
    run: Run, n: int, counts: Sequence[int], whole: Timed, repeats: int
) -> list[dict[str, Any]]:
    """The rows of steps of n tokens; of the counts the first is 0."""
    executor: Any = run.executor
    step, seen = step_of(run, n), Choices()
    executor.recorder = seen
    await executor.run(step)
    executor.recorder = None
    choices = seen.last
    n_layers, rows = len(choices), list[dict[str, Any]]()
    free = whole
    for misses in counts:
        missing = await asyncio.to_thread(leave_out, run, choices, misses)
        found = await timed(run, step, repeats)
        busy = executor._parts.exchange.layer_times(executor._last.epoch)
        cpu = 1e6 * float(np.median(busy[:, 1] - busy[:, 0]))
        free = found if not misses else free
        hits = free.parts.get("hits", 0.0) / n_layers
        extra = (found.us - free.us) / n_layers
        row = {
            "width": int(executor.planned.shares[0].share.model.spec.n_embd),
            "batch": n,
            "misses": misses,
            "missed_slots": missing,
            "layers": n_layers,
            "threads": executor._parts.exchange.team.n_threads,
            "free_us": (free.us - whole.us) / n_layers,
            "extra_us": extra,
            "hits_us": hits,
            "cpu_us": cpu,
            "over_us": extra - max(0.0, cpu - hits),
            "parts_us": {name: round(us, 1) for name, us in found.parts.items()},
            "step_us": found.all_us,
            "step_us_all_on_gpu": whole.all_us,
        }
        rows.append(row)
    return rows


def leave_out(run: Run, choices: I32, misses: int) -> float:
    """Have every layer miss so many of the experts that it uses, those that the fewest tokens use,
    and otherwise only such that it does not; returns how many slots of a layer they serve."""
    experts, memory = run.experts(), run.executor._parts.memory  # type: ignore[attr-defined]
    n_spare = experts.cache.slot_of.shape[1] - experts.settings.slots
    orders, missed = [], []
    for layer, used in enumerate(choices.reshape(len(choices), -1)):
        n_expert = experts.cache.layers[layer].n_expert
        uses = np.bincount(used[used >= 0], minlength=n_expert)
        by_use = np.lexsort((np.arange(n_expert), uses)).tolist()
        idle = [expert for expert in by_use if not uses[expert]]
        chosen = [expert for expert in by_use if uses[expert]][:misses]
        out = [*chosen, *idle][:n_spare]
        orders.append([*(expert for expert in reversed(by_use) if expert not in out), *out[::-1]])
        missed.append(sum(int(uses[expert]) for expert in chosen))
    experts._policy = Fixed(orders)
    wanted = experts.settings
    (part,) = memory._parts
    for slots in (0, wanted.slots):  # what is there stays first, so nothing may be
        experts.resize(replace(wanted, slots=slots))
    transfer_all(part._device, [Transfer(part._table, flat(experts.table()))])
    return float(np.mean(missed))


@dataclass(frozen=True)
class Timed:
    """Microseconds by the GPU's clock, of the graph with stamps: the median, each part's, all."""

    us: float
    parts: dict[str, float]
    all_us: list[float]


async def timed(run: Run, step: Step, repeats: int) -> Timed:
    """A step again and again, from its first stamp to its last; the first four do not count."""
    executor: Any = run.executor
    executor.timed = True
    try:
        for _ in range(repeats + 4):
            await executor.run(step)
        times = [found.parts for found in executor.take_times() if not found.fresh][-repeats:]
    finally:
        executor.timed = False
    inside = [{str(k): 1e6 * v for k, v in parts.items() if k != Part.LAUNCH} for parts in times]
    totals = [sum(parts.values()) for parts in inside]
    names = dict.fromkeys(name for parts in inside for name in parts)
    medians = {n: float(np.median([parts.get(n, 0.0) for parts in inside])) for n in names}
    return Timed(float(np.median(totals)), medians, [round(t, 1) for t in totals])


def step_of(run: Run, n: int) -> Step:
    """One token of each of n texts."""
    text = recorded_ids(POSITION + n + 1, run.limits.n_vocab)
    return run.decode_step([np.roll(text, s) for s in range(n)], POSITION)
