"""Whether the GPU says what the CPU says, whatever is cached: logits of a model, compared.

    python -m bench agree model.gguf --caches 0,16 --out result.json
    python -m bench agree glm-5.3-flash:5 qwen3.8-flash-next:4

A name from `python -m bench synthetic` and a number of layers stand for a file of that shape, which
is written first; :FORMAT and :EXPERTS behind them replace its formats and its number of experts.
Logits of a prompt's last token and of forced ones after it: those of the GPU relative to those of
the CPU, and whether prompts cut elsewhere, batches and smaller caches change a bit.

Weights of blocks meet activations that are rounded to 8 bits: a difference of 1e-6 in an input can
be one of 1e-3 in a product, a router's near tie more, and in a random model these grow with every
layer. What that makes of another small difference is shown beside: the CPU's logits with keys and
values kept as f32, relative to f16 ones. With F16 weights nothing is rounded, and 1e-3 has to hold
for tokens that every router sends to the same experts. Where some experts are missing on the GPU,
the choices of both are compared (`routing`): how many differ, and the errors of tokens with and
without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import machine
from bench.runs import Run, recorded_ids, run_of
from bench.synthetic import MIXED, MODELS, write_model
from bench.synthetic.recurrent_models import Qwen4Exp
from ops.gpu.kv_layout import PAGE_TOKENS
from runtime.engine.step import Step
from runtime.experts.recording import RecordedExecutor

F32 = NDArray[np.float32]

TOLERANCE = 1e-3
"""Of the largest logit of a token."""
TABLE_ROWS = 1_600_000
"""Of n-gram tables in files that are written here: with values, unlike those of the real size."""


def main(argv: list[str]) -> int:
    """Compare what the arguments ask for; 1 where a model fails or bits differ."""
    parser = argparse.ArgumentParser(prog="python -m bench agree", description=__doc__)
    parser.add_argument("models", nargs="+", help="GGUF files, or NAME:LAYERS")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=8, help="forced tokens after it")
    parser.add_argument("--caches", default="8", help="experts of a layer in VRAM, with commas")
    parser.add_argument("--threads", type=int, help="CPU workers; default one a core")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for written files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for name in args.models:
        began = time.perf_counter()
        try:
            path = model_file(name, args.folder)
            caches = [int(part) for part in args.caches.split(",") if part]
            work = compare(path, args.prompt, args.tokens, caches, args.threads)
            row = asyncio.run(work)
        except Exception:  # the other models are still worth a look
            row = {"error": traceback.format_exc()}
        rows.append({"model": name, **row, "seconds": round(time.perf_counter() - began, 1)})
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        report = {"machine": machine(), "settings": vars(args), "rows": rows}
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return int(any("error" in row or not row["same_bits"] for row in rows))


def model_file(name: str, folder: Path) -> Path:
    """The file `name`, or one of the shape NAME:LAYERS:FORMAT:EXPERTS, written if it is not there.

    Raises: ValueError for a part that is none; OSError.
    """
    model, layers, fmt, experts = (*name.split(":"), "", "", "")[:4]
    if model not in MODELS:
        return Path(name)
    shape: Any = MODELS[model]
    if isinstance(shape, Qwen4Exp):
        shape = replace(shape, n_table_rows=TABLE_ROWS)
    if experts:
        shape = replace(shape, n_expert=int(experts))
    path = folder / f"{name.replace(':', '-')}.gguf"
    if not path.exists():
        write_model(path, shape, int(layers or shape.n_layers), 0.5, fmt=fmt or MIXED)
    return path


async def compare(
    path: Path, n_prompt: int, n_tokens: int, caches: list[int], n_threads: int | None
) -> dict[str, Any]:
    """The largest difference to the CPU of each token, and whether all GPU runs have one result."""
    settings: dict[str, Any] = {"n_batch": max(n_prompt, 512), "n_threads": n_threads}
    chosen = {name: Choices() for name in ("cpu", "f32", "gpu")}
    async with run_of(path, "cpu", 2, n_prompt + n_tokens, **settings) as run:
        chosen["cpu"].record_from(run)
        expected = await _logits(run, n_prompt, n_tokens, n_prompt)
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    async with run_of(path, "cpu", 2, n_prompt + n_tokens, **settings, **exact) as run:
        chosen["f32"].record_from(run)
        moved = await _logits(run, n_prompt, n_tokens, n_prompt)
    results: dict[str, F32] = {}
    async with run_of(path, "cuda", 2, n_prompt + n_tokens) as run:
        facts = run.executor.describe()
        results["whole"] = await _logits(run, n_prompt, n_tokens, n_prompt)
        results["cut"] = await _logits(run, n_prompt, n_tokens, cut_of(n_prompt))
        results["pair"] = await _logits(run, n_prompt, n_tokens, n_prompt, pair=True)
        is_moe = "experts" in facts
    for slots in caches if is_moe else []:
        few = {"moe_expert_cache": slots, "n_threads": n_threads}
        async with run_of(path, "cuda", 2, n_prompt + n_tokens, **few) as run:
            chosen["gpu"] = Choices()
            chosen["gpu"].record_from(run)
            results[f"cache {slots}"] = await _logits(run, n_prompt, n_tokens, n_prompt)
            facts[f"cache {slots}"] = _experts(run.executor.describe())
    whole = results["whole"]
    errors, alone = relative(whole, expected), relative(moved, expected)
    same = {
        name: bool(np.array_equal(x.view(np.uint32), whole.view(np.uint32)))
        for name, x in results.items()
    }
    return {
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "median_of_cpu_with_f32_cache": float(np.median(alone)),
        "largest_of_cpu_with_f32_cache": float(alone.max()),
        "tokens_within_tolerance": f"{int((errors <= TOLERANCE).sum())} of {len(errors)}",
        "same_best_token": float((whole.argmax(1) == expected.argmax(1)).mean()),
        "routing": routing(chosen["cpu"], chosen["gpu"], errors),
        "routing_of_cpu_with_f32_cache": routing(chosen["cpu"], chosen["f32"], alone),
        "same_bits": all(same.values()),
        "bits": same,
        "experts": {k: v for k, v in facts.items() if k.startswith(("expert", "cache "))},
    }


def cut_of(n_prompt: int) -> int:
    """Tokens of a piece, about a third: whole pages, as the scheduler cuts prompts of models with
    recurrent layers, whose bits depend on other cuts."""
    return PAGE_TOKENS * max(1, n_prompt // (3 * PAGE_TOKENS))


def relative(logits: F32, expected: F32) -> NDArray[np.float64]:
    """The largest difference of each token's logits, of the largest one that was expected."""
    differences = np.abs(logits.astype(np.float64) - expected)
    return np.asarray(differences.max(1) / np.abs(expected).max(1))


class Choices:
    """The experts of every token of one text, as a recorder sees them."""

    def __init__(self) -> None:
        self._seen: list[NDArray[np.int32]] = []

    def record_from(self, run: Run) -> None:
        """See what `run` chooses from now on, if it says."""
        if isinstance(run.executor, RecordedExecutor):
            run.executor.recorder = self

    def record(self, step: Step, choices: NDArray[np.int32]) -> None:
        """See `RoutingRecorder.record`."""
        self._seen.append(np.sort(choices, axis=2))

    @property
    def all(self) -> NDArray[np.int32]:
        """i32[n_layers, n_tokens, n_used], sorted; nothing was seen: of no layers."""
        return np.concatenate(self._seen, axis=1) if self._seen else np.empty((0, 0, 0), np.int32)


def routing(
    expected: Choices, found: Choices, errors: NDArray[np.float64]
) -> dict[str, Any] | None:
    """Of the tokens with these errors, the last ones, and of all before them: choices that differ.

    None where one of both does not know its choices.
    """
    n_tokens, a, b = len(errors), expected.all, found.all
    if a.shape != b.shape or not a.size:
        return None
    known = (a >= 0).all(axis=2) & (b >= 0).all(axis=2)
    differs = known & (a != b).any(axis=2)
    own = differs[:, -n_tokens:].any(axis=0)
    return {
        "choices": int(known.sum()),
        "that_differ": int(differs.sum()),
        "tokens": n_tokens,
        "tokens_that_differ": int(own.sum()),
        "largest_error_of_equal_tokens": float(errors[~own].max(initial=0.0)),
        "median_error_of_equal_tokens": float(np.median(errors[~own])) if (~own).any() else None,
        "largest_error_of_others": float(errors[own].max(initial=0.0)),
    }


async def _logits(run: Run, n_prompt: int, n_tokens: int, cut: int, pair: bool = False) -> F32:
    """f32[outputs, n_vocab]: of the prompt's last tokens, read in pieces of `cut`, and the others.

    pair: sequence 1 does the same beside it; the rows of both must be equal
    """
    text = recorded_ids(n_prompt + n_tokens, run.limits.n_vocab)
    rows: list[F32] = []
    sequences = range(2) if pair else range(1)
    for s in sequences:
        for first in range(0, n_prompt, cut):
            last = min(first + cut, n_prompt)
            (result,) = await run.prompt(s, text, first, last)
    rows.append(result.logits.copy())
    for position in range(n_prompt, n_prompt + n_tokens):
        result = await run.decode([text for _ in sequences], position)
        rows.append(result.logits[-1:].copy())
    return np.concatenate(rows)


def _experts(facts: dict[str, object]) -> dict[str, object]:
    names = ("expert_hits", "expert_cpu_misses", "expert_fetched", "expert_uploads")
    return {name: facts[name] for name in names if name in facts}
