"""Where a step's time goes on the GPU: by kernel, beside bare reads of the same bytes.

    python -m bench step model.gguf --batches 1,8 --prompts 512 --cache 16 --out result.json
    python -m bench step glm-5.3-flash:5 --batches 1

Steps of forced tokens are timed whole; then the launches of each kind run in a graph of their own,
those of all layers in turn, so that weights come from memory. Kernels that start beside their
predecessor gain more in the real graph: its time is less than the sum. Left out are kernels that
cannot run alone (the hand-over to the CPU, the step's begin and end); misses appear as `wait`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.agree import model_file
from bench.launch_bytes import launch_bytes, reader
from bench.machine import machine
from bench.read_rates import GPUReads, graph_microseconds
from bench.runs import Run, in_graph_us, recorded_ids, run_of
from runtime.cuda.graph import Launch
from runtime.cuda.stream import Event, Stream
from runtime.engine.gpu.launch_plan import PlannedLaunch
from runtime.engine.gpu.step_shape import part_of as part_of_step
from runtime.engine.gpu.step_shape import parts_of
from runtime.engine.step import Step, StepKind

NOT_ALONE = ("refresh", "report", "mailbox", "hand_over", "take_over", "fetch_experts")
"""Kernels that wait for somebody, or that move the step's number on."""
N_LAUNCHES = 24
N_WARM = 4
"""Steps before those that count: every block of the control ring then holds one of this shape."""
PARTS = {
    "experts": ("experts.",),
    "router": ("router", "route", "experts.group"),
    "attention": ("heads", "attention_join", "attention", "index", "key_up", "value_up"),
    "recurrent": ("delta_", "gated_norm", "decay", "gate", "memory"),
    "streams": ("mixer_norm", "feed_forward_norm", "output_norm", "settle"),
    "output": ("logits", "candidates", "sample", "embed"),
}
"""Parts of a step by the beginnings of launches' names; products of attention are `dense`."""
DENSE = ("attention_output",)


@dataclass(frozen=True)
class KernelRow:
    """All launches of a kind in a step: their GPU time, the bytes that they read, a bare read."""

    name: str
    entry: str
    part: str
    count: int
    us: float
    n_bytes: int
    read_us: float

    @property
    def gb_per_s(self) -> float:
        return self.n_bytes / self.us / 1e3 if self.us > 0 else 0.0

    def __str__(self) -> str:
        line = f"{self.us:9.1f} us {self.count:4} x {self.us / self.count:7.2f}  {self.part:9} "
        line += f"{self.name:28} {self.entry:26}"
        if not self.n_bytes or self.us <= 0:
            return line
        return f"{line} {self.gb_per_s:7.0f} GB/s {100 * self.read_us / self.us:4.0f} %"


def main(argv: list[str]) -> int:
    """Time what the arguments ask for, print the tables, write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench step", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--batches", default="1", help="tokens of decode steps, with commas")
    parser.add_argument("--prompts", default="", help="tokens of prompt steps, with commas")
    parser.add_argument("--position", type=int, default=512, help="of the decoded tokens")
    parser.add_argument("--cache", type=int, default=-1, help="experts of a layer in VRAM")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    result = asyncio.run(measure(args))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Open the model and time every step."""
    batches, prompts = _numbers(args.batches), _numbers(args.prompts)
    path = model_file(args.model, args.folder)
    n_tokens = max([args.position + N_WARM + args.repeats + 2, *prompts])
    settings = {"n_batch": max([*prompts, *batches, 512]), "moe_expert_cache": args.cache}
    rows = []
    async with run_of(path, "cuda", max([*batches, 1]), n_tokens, **settings) as run:
        text = recorded_ids(n_tokens, run.limits.n_vocab)
        device = run.executor._parts.stream.device  # type: ignore[attr-defined]
        with GPUReads(device) as reads:
            for n in prompts:
                step = run.step(StepKind.PREFILL, [(0, text, 0, n)], [n - 1])
                rows.append(await step_row(run, [step] * args.repeats, f"prompt {n}", reads))
            for n in batches:
                steps = [
                    run.decode_step([np.roll(text, s) for s in range(n)], args.position + i)
                    for i in range(args.repeats)
                ]
                rows.append(await step_row(run, steps, f"decode {n}", reads))
            rate = await asyncio.to_thread(reads.bytes_per_second)
        facts = run.executor.describe()
    settings = {k: str(v) for k, v in vars(args).items()}
    return {
        "machine": {**machine(), "gpu": facts.get("gpu")},
        "settings": settings,
        "read_gb_per_s": rate / 1e9,
        "executor": facts,
        "steps": rows,
    }


async def step_row(run: Run, steps: Sequence[Step], name: str, reads: GPUReads) -> dict[str, Any]:
    """Time the steps, then the kernels of the last one; print both."""
    for step in steps[:N_WARM]:
        await run.executor.run(step)
    times = []
    for step in steps:
        began = time.perf_counter()
        await run.executor.run(step)
        times.append(1e6 * (time.perf_counter() - began))
    last, n_parts = last_part(run, steps[-1])
    kernels, n_launches, graph_us = await asyncio.to_thread(kernel_rows, run, last, reads)
    row = breakdown(name, float(np.median(times)), graph_us, n_launches, kernels, n_parts)
    print(table(row, kernels), flush=True)
    row["in_graph_us"] = await in_graph_us(run, steps)
    print(f"  by the GPU's clock: us {row['in_graph_us']}", flush=True)
    row["all_us"] = [round(t, 1) for t in times]
    row["kernels"] = [{**asdict(k), "gb_per_s": round(k.gb_per_s, 1)} for k in kernels]
    return row


def last_part(run: Run, step: Step) -> tuple[Step, int]:
    """The part of `step` that the GPU performs last, by one graph, and how many parts there are."""
    parts: Any = run.executor._parts  # type: ignore[attr-defined]
    most = parts.shapes.most_tokens(step.kind, fetches=parts.experts.may_fetch)
    spans = parts_of(step, most)
    return (part_of_step(step, spans[-1])[0] if len(spans) > 1 else step), len(spans)


def breakdown(
    name: str,
    wall_us: float,
    graph_us: float | None,
    n_launches: int,
    kernels: list[KernelRow],
    n_parts: int = 1,
) -> dict[str, Any]:
    """What is known of a step's time.

    Of a step in several parts, each a graph, `wall_us` is of all and the rest of the last one.

    parts       the kernels' own times
    overlapped  by how much the graph is quicker than these together
    host        before the graph begins and after it ends; with misses `wait` instead: what is
                neither the kernels' nor theirs alone, the CPU's and the host's
    """
    parts: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        parts[kernel.part] += kernel.us
    total = sum(parts.values())
    row: dict[str, Any] = {"step": name, "wall_us": wall_us, "launches": n_launches}
    row["kernels_us"] = total
    row["read_us"] = sum(kernel.read_us for kernel in kernels)
    row["parts_us"] = {k: round(v, 1) for k, v in sorted(parts.items(), key=lambda kv: -kv[1])}
    if n_parts > 1:
        row["parts"] = n_parts
    if graph_us is None and n_parts == 1:
        row["wait_us"] = wall_us - total
    elif graph_us is not None:
        row |= {"graph_us": graph_us, "overlapped_us": total - graph_us}
        if n_parts == 1:
            row["host_us"] = wall_us - graph_us
    return row


def kernel_rows(run: Run, step: Step, reads: GPUReads) -> tuple[list[KernelRow], int, float | None]:
    """The kernels of a step's graph, how many launches it has, and its own time if it has one.

    Blocks: not on the event loop. A graph that waits for the CPU has no time of its own.
    """
    parts: Any = run.executor._parts  # type: ignore[attr-defined]
    shape, stream = parts.shapes.of(step), parts.stream
    read, position = reader(stream), int(step.positions.max())
    kinds: dict[tuple[str, str], list[tuple[PlannedLaunch, Launch]]] = defaultdict(list)
    launches = parts.steps.launches(shape)
    for planned, launch in launches:
        name = short_name(planned.name)
        if not any(word in planned.kernel.entry for word in NOT_ALONE):
            kinds[name, planned.kernel.entry].append((planned, launch))
    routes = {
        planned.name: launch for planned, launch in launches if planned.name.endswith("route")
    }
    rows = []
    with _events(stream) as (own, begin, end):
        for (name, entry), alike in kinds.items():
            repeats = max(1, N_LAUNCHES // len(alike))
            lines = [_line(alike, routes, with_it) for with_it in (True, False)]
            times = [graph_microseconds(own, line * repeats, begin, end) for line in lines if line]
            us = (times[0] - sum(times[1:])) / repeats
            sizes = [launch_bytes(planned, shape, position, read) for planned, _ in alike]
            read_us = sum(reads.microseconds(n) for n in sizes if n)
            rows.append(KernelRow(name, entry, part_of(name), len(alike), us, sum(sizes), read_us))
        graph_us = None if parts.exchange is not None else _graph_us(run, step, begin, end)
    rows.sort(key=lambda row: -row.us)
    return rows, len(launches), graph_us


def _line(
    alike: Sequence[tuple[PlannedLaunch, Launch]], routes: Mapping[str, Launch], with_it: bool
) -> list[Launch]:
    """Launches of one kind in turn.

    Kernels of experts read where these are from what the router's kernel of their own layer wrote
    last (others have experts elsewhere, of another size): it runs before each of them, and its time
    alone, not `with_it`, is taken off.
    """
    line = []
    for planned, launch in alike:
        route = None
        if "experts" in planned.arguments and not planned.name.endswith("route"):
            route = routes.get(f"{planned.name.partition('.')[0]}.route")
        line += [] if route is None else [route]
        line += [launch] if with_it else []
    return line


def short_name(name: str) -> str:
    """A launch's name without its layer's number."""
    head, _, rest = name.partition(".")
    return rest if rest and head.isdigit() else name


def part_of(name: str) -> str:
    """The part of a step that a launch belongs to."""
    if name.startswith(DENSE):
        return "dense"
    if "_streams_" in name or name.endswith("_input"):
        return "streams"
    router = PARTS["router"]
    if name.startswith(router):
        return "router"
    return next((part for part, names in PARTS.items() if name.startswith(names)), "dense")


def table(row: dict[str, Any], kernels: list[KernelRow]) -> str:
    """A step's breakdown and its kernels, for people."""
    head = ", ".join(
        f"{name} {row[f'{name}_us']:.0f}"
        for name in ("wall", "graph", "kernels", "read", "overlapped", "host", "wait")
        if f"{name}_us" in row
    )
    if "parts" in row:
        head += f" (the kernels' of the last of {row['parts']} parts)"
    lines = [f"== {row['step']}: us {head}; {row['launches']} launches; {row['parts_us']}"]
    lines += [f"  {kernel}" for kernel in kernels]
    return "\n".join(lines)


@contextmanager
def _events(stream: Stream) -> Iterator[tuple[Stream, Event, Event]]:
    device = stream.device
    with (
        Stream(device, "kernels") as own,
        Event(device, timed=True) as begin,
        Event(device, timed=True) as end,
    ):
        yield own, begin, end


def _graph_us(run: Run, step: Step, begin: Event, end: Event) -> float:
    """Of the step's graph, launched again and again: the median."""
    executor: Any = run.executor
    parts = executor._parts
    captured = parts.steps.of(parts.shapes.of(step))
    times = []
    for _ in range(N_LAUNCHES):
        parts.stream.record(begin)
        captured.graph.launch(parts.stream)
        parts.stream.record(end)
        parts.stream.synchronize()
        times.append(1e3 * end.milliseconds_since(begin))
        executor._epoch = (executor._epoch + 1) & 0xFFFFFFFF
    return float(np.median(times))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
