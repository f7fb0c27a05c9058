"""Models whose experts exceed the GPU's memory: speed, hits, and the share of what is possible.

    python -m bench hybrid glm-5.3-flash:12 --limits 22,44 --out result.json
    python -m bench hybrid model.gguf --limits 22

NAME:LAYERS is a file of that shape with so many of its layers, written first. It gets as many slots
a layer for experts as the engine's plan gives the whole model on a GPU of so many GiB. Tokens are
forced: the words of a recorded text. A whole model's speed is reckoned from the layers
that ran: their number times the time of one, and the output matrix once. V, M and P are bare reads
of the same run; T_s is the bound without overlap of layers (bench/bounds.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.agree import model_file
from bench.bounds import Rates, TokenWork, overlapped_seconds, serial_seconds
from bench.machine import machine
from bench.read_rates import GPUReads, host_bytes_per_second, link_bytes_per_second
from bench.runs import Run, in_graph_us, recorded_ids, run_of
from bench.synthetic import MODELS
from bench.whole_model import held
from runtime.models import open_model
from runtime.models.model import Model
from runtime.models.sizes import ModelSizes, model_sizes

ON_CPU, ON_GPU = 0, 1
HOST_BYTES = 4 << 30
I64 = NDArray[np.int64]


def main(argv: list[str]) -> int:
    """Measure what the arguments ask for and write the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m bench hybrid", description=__doc__)
    parser.add_argument("model", help="GGUF file, or NAME:LAYERS of `python -m bench synthetic`")
    parser.add_argument("--limits", default="22,44", help="GiB of the GPU's memory, with commas")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=96, help="forced tokens that are timed")
    parser.add_argument("--warm", type=int, default=160, help="forced tokens before them")
    parser.add_argument("--n-batch", type=int, help="tokens of a prompt chunk; default as planned")
    parser.add_argument("--threads", type=int, help="CPU workers; default one a core")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    name, path = args.model.partition(":")[0], model_file(args.model, args.folder)
    rows = []
    for text in args.limits.split(","):
        row = asyncio.run(measure(path, name, float(text), args))
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "step_us"}), flush=True)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"machine": machine(), "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


@dataclass(frozen=True)
class Measured:
    """What ran: seconds, microseconds of each timed token, experts of each MoE layer a token by who
    served them, layers that missed, the waits of a step, the model's sizes, bare reads."""

    opened: float
    prompts: list[float]
    steps: list[float]
    counts: NDArray[np.float64]
    missed: float
    waits: dict[str, float]
    sizes: ModelSizes
    rates: Rates
    facts: dict[str, object]


async def measure(path: Path, name: str, limit: float, args: argparse.Namespace) -> dict[str, Any]:
    """One run: the prompt, warm tokens, timed tokens, then the bare reads."""
    n_text = args.prompt + args.warm + args.tokens + 1
    settings: dict[str, Any] = {"n_batch": args.n_batch, "n_threads": args.threads}
    plan: dict[str, object] = {}
    if name in MODELS:
        whole = held(MODELS[name], limit, n_text, args.n_batch)
        settings |= {"moe_expert_cache": whole.slots, "n_batch": whole.n_batch}
        plan = {"whole_model": asdict(whole)}
    else:
        settings["vram_limit"] = limit
    began = time.perf_counter()
    async with run_of(path, "cuda", 1, n_text, **settings) as run:
        opened = time.perf_counter() - began
        text = recorded_ids(n_text, run.limits.n_vocab)
        prompts = [await _timed_prompt(run, text, args.prompt) for _ in range(2)]
        first = args.prompt + args.warm
        await decode(run, text, args.prompt, first)
        used = usage(run)
        steps, missed = await decode(run, text, first, n_text - 1)
        counts = (usage(run) - used) / len(steps)
        stamped = range(n_text - 1 - len(steps) // 4, n_text)
        waits = await in_graph_us(run, [run.decode_step([text], at) for at in stamped])
        with open_model(path) as model:
            sizes = model_sizes(model.spec, model.file.tensors)
            rates = await asyncio.to_thread(read_rates_of, run, model)
        facts = run.executor.describe()
    found = Measured(opened, prompts, steps, counts, missed, waits, sizes, rates, facts)
    return {
        "limit_gib": limit,
        **plan,
        **speeds(found, name, args.prompt),
        **shares(found, n_text),
        "executor": {k: v for k, v in facts.items() if k.startswith("expert") or k == "gpu"},
    }


def speeds(found: Measured, name: str, n_prompt: int) -> dict[str, Any]:
    """Tokens a second of what ran, and of the whole model that it is a part of."""
    us, n_layers = float(np.median(found.steps)), len(found.sizes.layers)
    n_whole = MODELS[name].n_layers if name in MODELS else n_layers
    output = 1e6 * found.sizes.output_bytes / found.rates.gpu
    whole = output + (us - output) * n_whole / n_layers
    prompt_rates = [round(n_prompt / seconds, 1) for seconds in found.prompts]
    return {
        "layers": f"{n_layers} of {n_whole}",
        "opened_seconds": round(found.opened, 2),
        "step_us": [round(t, 1) for t in found.steps],
        "median_us": round(us, 1),
        "tokens_per_second": round(1e6 / us, 2),
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


async def decode(run: Run, text: Any, first: int, end: int) -> tuple[list[float], float]:
    """Force tokens first .. end: microseconds of each, and how many layers missed on average."""
    times, n_missed, before = [], 0, usage(run)
    for position in range(first, end):
        began = time.perf_counter()
        await run.decode([text], position)
        times.append(1e6 * (time.perf_counter() - began))
        now = usage(run)
        n_missed += int((now[:, ON_CPU] > before[:, ON_CPU]).sum())
        before = now
    return times, n_missed / max(len(times), 1)


def usage(run: Run) -> I64:
    """i64[n_layers, kinds]: who has served how many experts so far; empty where the GPU has all."""
    experts = run.experts()
    return np.zeros((0, 2), np.int64) if experts is None else experts.usage.by_layer.copy()


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
