"""Models whose experts exceed the GPU's memory: speed, hits, and the share of what is possible.

    python -m bench hybrid glm-5.3-flash:12 --limits 22,44 --out result.json
    python -m bench hybrid model.gguf --residency 25,50,75 --modes cache,layers,auto

NAME:LAYERS is a file of that shape with so many of its layers, written first. With limits it gets
as many slots a layer for experts as the engine's plan gives the whole model on a GPU of so many
GiB; with residencies there is room for that share of its routed experts, in percent.

Tokens are forced: the words of a recorded text. Steps are timed the way an engine makes an answer,
which runs ahead of the host, and beside that (`executor`) one at a time, with logits for the host.
A whole model's speed is reckoned from the layers that ran: their number times the time of one, and
the output matrix once. V, M and P are bare reads of the same run; T_s is the bound without overlap
of layers (bench/bounds.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.agree import model_file
from bench.bounds import Rates, TokenWork, overlapped_seconds, serial_seconds
from bench.machine import machine
from bench.read_rates import GPUReads, host_bytes_per_second, link_bytes_per_second
from bench.residency import experts_of, limit_of
from bench.runs import Run, config_of, in_graph_us, recorded_ids, run_of
from bench.synthetic import MODELS
from bench.whole_model import held
from runtime.experts.totals import ON_CPU, ON_GPU
from runtime.models import open_model
from runtime.models.model import Model
from runtime.models.sizes import ModelSizes, model_sizes

HOST_BYTES = 4 << 30


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench hybrid", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--limits", default="22,44", help="GiB of the GPU's memory, with commas")
    size.add_argument("--residency", help="percent of the experts that have room, with commas")
    parser.add_argument(
        "--modes", default="auto", help="of the experts' cache: cache, layers, auto"
    )
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="forced tokens that are timed")
    parser.add_argument("--prompts", type=int, default=2, help="times that it is read")
    parser.add_argument("--alone", type=int, default=32, help="tokens that are timed one at a time")
    parser.add_argument("--warm", type=int, default=160, help="forced tokens before them")
    parser.add_argument("--n-batch", type=int, help="tokens of a prompt chunk; default as planned")
    parser.add_argument("--threads", type=int, help="CPU workers; default one a core")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    name, path = args.model.partition(":")[0], model_file(args.model, args.folder)
    rows: list[dict[str, Any]] = []
    settings = {k: str(v) for k, v in vars(args).items()}
    rates: list[Rates] = []
    for point in points(path, name, args):
        row = asyncio.run(measure(path, name, point, args, rates))
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "step_us"}), flush=True)
        if args.out:
            report = {"machine": machine(), "settings": settings, "rows": rows}
            args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


@dataclass(frozen=True)
class Point:
    """What is measured once: its name in the result, the settings, what is told of them."""

    label: dict[str, object]
    settings: dict[str, Any]
    told: dict[str, object]


def points(path: Path, name: str, args: argparse.Namespace) -> Iterator[Point]:
    """All of them."""
    n_text = args.prompt + args.warm + args.tokens + 1
    shared: dict[str, Any] = {"n_batch": args.n_batch, "n_threads": args.threads}
    modes = args.modes.split(",")
    if args.residency:
        config = config_of(path, "cuda", 1, n_text, **shared)
        for text in args.residency.split(","):
            limit = limit_of(config, float(text))
            planned = experts_of(replace(config, vram_limit=limit))
            told: dict[str, object] = {"planned": str(planned.holding), "reason": planned.reason}
            for mode in modes:
                settings = {**shared, "vram_limit": limit, "moe_cache": (("mode", mode),)}
                label = {"residency": float(text), "mode": mode, "limit_gib": round(limit, 3)}
                yield Point(label, settings, told)
        return
    for text in args.limits.split(","):
        limit, label = float(text), {"limit_gib": float(text)}
        if name in MODELS:
            whole = held(MODELS[name], limit, n_text, args.n_batch)
            settings = {**shared, "moe_expert_cache": whole.slots, "n_batch": whole.n_batch}
            yield Point(label, settings, {"whole_model": asdict(whole)})
        else:
            for mode in modes:
                settings = {**shared, "vram_limit": limit, "moe_cache": (("mode", mode),)}
                yield Point({**label, "mode": mode}, settings, {})


@dataclass(frozen=True)
class Measured:
    """What ran: seconds, microseconds of each timed token, experts of each MoE layer a token by who
    served them, layers that missed, the waits of a step, the model's sizes, bare reads; steps one
    at a time."""

    opened: float
    prompts: list[float]
    steps: list[float]
    counts: NDArray[np.float64]
    missed: float
    waits: dict[str, float]
    sizes: ModelSizes
    rates: Rates
    facts: dict[str, object]
    alone: list[float]


async def measure(
    path: Path, name: str, point: Point, args: argparse.Namespace, rates: list[Rates]
) -> dict[str, Any]:
    """One run: the prompt, warm tokens, timed tokens, then the bare reads, unless `rates` has them:
    those of the first point are all points'."""
    n_text = args.prompt + args.warm + args.tokens + 1
    began = time.perf_counter()
    async with run_of(path, "cuda", 1, n_text, **point.settings) as run:
        opened = time.perf_counter() - began
        text = recorded_ids(n_text + 1, run.limits.n_vocab)
        prompts = [await _timed_prompt(run, text, args.prompt) for _ in range(args.prompts)]
        first = args.prompt + args.warm
        await run.run_ahead(text, args.prompt, first)
        before = uploads(run)
        timed = await run.run_ahead(text, first, n_text - 1)
        n_uploads = (uploads(run) - before) / len(timed.us)
        alone = [await _decoded(run, text, at) for at in range(n_text - 1 - args.alone, n_text - 1)]
        stamped = range(n_text - 1 - len(timed.us) // 4, n_text)
        waits = await in_graph_us(run, [run.decode_step([text], at) for at in stamped])
        with open_model(path) as model:
            sizes = model_sizes(model.spec, model.file.tensors)
            if not rates:
                rates.append(await asyncio.to_thread(read_rates_of, run, model))
        facts = run.executor.describe()
        executor: Any = run.executor
        (holding,) = executor.planned.experts
    found = Measured(
        opened,
        prompts,
        timed.us,
        timed.counts.mean(axis=0),
        float((timed.counts[:, :, ON_CPU] > 0).sum(axis=1).mean()) if timed.counts.size else 0.0,
        waits,
        sizes,
        rates[0],
        facts,
        alone,
    )
    return {
        **point.label,
        **point.told,
        "holding": str(holding.holding),
        "slots": sum(holding.slots),
        **speeds(found, name, args.prompt),
        **shares(found, n_text),
        "uploads_a_token": round(n_uploads, 2),
        "executor": {k: v for k, v in facts.items() if k.startswith("expert") or k == "gpu"},
    }


def speeds(found: Measured, name: str, n_prompt: int) -> dict[str, Any]:
    """Tokens a second of what ran, and of the whole model that it is a part of."""
    us, n_layers = float(np.median(found.steps)), len(found.sizes.layers)
    n_whole = MODELS[name].n_layers if name in MODELS else n_layers
    output = 1e6 * found.sizes.output_bytes / found.rates.gpu
    whole = output + (us - output) * n_whole / n_layers
    prompt_rates = [round(n_prompt / seconds, 1) for seconds in found.prompts] or [0.0]
    return {
        "layers": f"{n_layers} of {n_whole}",
        "opened_seconds": round(found.opened, 2),
        "step_us": [round(t, 1) for t in found.steps],
        "median_us": round(us, 1),
        "tokens_per_second": round(1e6 / us, 2),
        "mean_tokens_per_second": round(1e6 / float(np.mean(found.steps)), 2),
        "alone_us": round(float(np.median(found.alone)), 1) if found.alone else None,
        "whole_model_tokens_per_second": round(1e6 / whole, 2),
        "prompt_tokens_per_second": prompt_rates,
        "whole_model_prompt_tokens_per_second": round(max(prompt_rates) * n_layers / n_whole, 1),
        "in_graph_us": found.waits,
    }


def shares(found: Measured, n_keys: int) -> dict[str, Any]:
    """Hits, and the time of a token beside what bounds it."""
    work = token_work(found.sizes, found.counts, found.missed, n_keys)
    seconds = float(np.median(found.steps)) / 1e6
    routed = max(float(found.counts.sum()), 1e-9)
    return {
        "hit_rate": round(float(found.counts[:, ON_GPU].sum()) / routed, 4),
        "layers_with_a_miss": round(found.missed, 2),
        "read_gb_per_s": {k: round(v / 1e9, 1) for k, v in asdict(found.rates).items()},
        "work": {k: round(v, 1) for k, v in asdict(work).items()},
        "share_of_serial_bound": round(serial_seconds(work, found.rates) / seconds, 3),
        "share_of_overlapped_bound": round(overlapped_seconds(work, found.rates) / seconds, 3),
    }


async def _decoded(run: Run, text: Any, position: int) -> float:
    """Microseconds of a step that gives its logits to the host."""
    began = time.perf_counter()
    await run.decode([text], position)
    return 1e6 * (time.perf_counter() - began)


def usage(run: Run) -> NDArray[np.int64]:
    """i64[n_layers, kinds]: who has served how many experts so far; empty where the GPU has all."""
    experts = run.experts()
    return np.zeros((0, 2), np.int64) if experts is None else experts.usage.by_layer.copy()


def uploads(run: Run) -> int:
    """Experts that have set out for the GPU so far."""
    return int(str(run.executor.describe().get("expert_uploads", 0)))


def token_work(
    sizes: ModelSizes, counts: NDArray[np.float64], missed: float, n_keys: int
) -> TokenWork:
    """What a token reads; counts: experts of each MoE layer by who served them."""
    layers = [layer for layer in sizes.layers if layer.n_expert]
    each = np.array([layer.expert_bytes for layer in layers], np.float64)
    rest = sizes.dense_bytes + 2 * sizes.state_bytes + 2 * n_keys * sizes.kv_elems_per_token
    if not len(counts):
        hits = float(sum(layer.n_used * layer.expert_bytes for layer in layers))
        return TokenWork(hits, 0.0, rest, len(sizes.layers), 0.0)
    hits, misses = float(counts[:, ON_GPU] @ each), float(counts[:, ON_CPU] @ each)
    return TokenWork(hits, misses, rest, len(sizes.layers), missed)


async def _timed_prompt(run: Run, text: Any, n_tokens: int) -> float:
    began = time.perf_counter()
    await run.prompt(0, text, 0, n_tokens)
    return time.perf_counter() - began


def read_rates_of(run: Run, model: Model) -> Rates:
    """Bare reads: of the GPU, of the experts' pages by as many threads as serve, of the link."""
    parts: Any = run.executor._parts  # type: ignore[attr-defined]
    n_threads = 1 if parts.exchange is None else parts.exchange.team.n_threads
    with GPUReads(parts.stream.device) as reads:
        gpu = reads.bytes_per_second()
    pieces = _expert_pages(model)
    host = host_bytes_per_second(pieces, n_threads) if pieces else 0.0
    return Rates(gpu, host, link_bytes_per_second(parts.stream.device))


def _expert_pages(model: Model) -> Sequence[NDArray[np.uint8]]:
    """Bytes of routed experts, 4 GB at most."""
    found, rest = [], HOST_BYTES
    for name in model.file.tensors:
        if name.endswith("_exps.weight") and rest > 0:
            data = model.weights[name].data.reshape(-1)[:rest]
            found.append(data)
            rest -= len(data)
    return found
