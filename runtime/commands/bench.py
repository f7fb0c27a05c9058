"""Measure prompt (pp) and generation (tg) speed, as llama-bench does: random tokens, no sampling.

Numbers may be lists and ranges: 1,2,4 or 1-8 or 2-8+2 or 1-64*2; every combination runs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from runtime.commands.bench_matrix import (
    Setup,
    Test,
    numbers,
    positive_numbers,
    prompt_and_generation,
    setups,
    tests,
)
from runtime.commands.bench_report import Report, Result, Row
from runtime.commands.options import add_model, file_name, say_demonstration, whole_number
from runtime.config import CACHE_TYPES, DEVICES, EngineConfig
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from runtime import Engine, Progress
    from runtime.commands.forward import ForwardPass

SEED = 1  # of the random tokens: two runs compute the same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, names, "GGUF files", "FILE,...")
    add("-p", "--n-prompt", type=numbers, metavar="N", help="prompt tests (default 512)")
    add("-n", "--n-gen", type=numbers, metavar="N", help="generation tests (default 128)")
    add("-pg", type=prompt_and_generation, action="append", default=[], metavar="P,N",
        help="a test of P prompt tokens, then N generated; may be repeated")  # fmt: skip
    add("-d", "--n-depth", type=numbers, default=[0], metavar="N",
        help="tokens already in the context (default 0)")  # fmt: skip
    add("-r", "--repetitions", type=whole_number(1), default=5, metavar="N",
        help="repetitions of each test (default 5)")  # fmt: skip
    add("-t", "--threads", type=positive_numbers, metavar="N", help="CPU workers")
    add("-b", "--batch-size", type=positive_numbers, default=[512], metavar="N",
        help="prompt tokens computed together (default 512)")  # fmt: skip
    add("-ctk", "--cache-type-k", type=cache_types, default=["f16"], metavar="TYPE",
        help="storage of keys (default f16)")  # fmt: skip
    add("-ctv", "--cache-type-v", type=cache_types, default=["f16"], metavar="TYPE",
        help="storage of values (default f16)")  # fmt: skip
    add("-o", "--output", choices=("md", "csv", "json", "jsonl"), default="md",
        help="form of the results (default md)")  # fmt: skip
    add("--no-warmup", action="store_true", help="no untimed run before each test")
    add("--device", choices=DEVICES, default="auto", help="where to compute (default auto)")


def names(text: str) -> list[str]:
    return [file_name(name) for name in text.split(",")]


def cache_types(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= set(CACHE_TYPES):
        raise argparse.ArgumentTypeError(f"{text!r}: use {', '.join(CACHE_TYPES)}")
    return kinds


def run(settings: argparse.Namespace) -> int:
    # As in llama-bench, -pg alone runs only that.
    if settings.n_prompt is None:
        settings.n_prompt = [] if settings.pg or settings.n_gen else [512]
    if settings.n_gen is None:
        settings.n_gen = [] if settings.pg else [128]
    wanted = tests(settings)
    if not wanted:
        raise ConfigError("nothing to measure: give -p, -n or -pg numbers above 0")
    say_demonstration(settings)
    report = Report(settings.output, write, table_columns(settings))
    report.begin()
    for setup in setups(settings):
        asyncio.run(measure_all(settings, setup, wanted, report))
    report.end()
    return 0


def write(text: str) -> None:
    print(text, end="", flush=True)


def table_columns(settings: argparse.Namespace) -> list[str]:
    """The columns that always stand, and those that somebody chose."""
    columns = ["model", "size", "params", "backend", "threads"]
    if settings.batch_size != [512]:
        columns.append("n_batch")
    if settings.cache_type_k != ["f16"]:
        columns.append("type_k")
    if settings.cache_type_v != ["f16"]:
        columns.append("type_v")
    return [*columns, "test", "t/s"]


async def measure_all(
    settings: argparse.Namespace, setup: Setup, wanted: list[Test], report: Report
) -> None:
    """Open one engine and run every test in it."""
    from runtime import ProgressBar, open_engine
    from runtime.commands.forward import ForwardPass

    config = EngineConfig(
        model=setup.model,
        n_ctx=max(2, *(test.n_ctx for test in wanted)),
        n_parallel=1,
        n_threads=setup.n_threads,
        n_batch=setup.n_batch,
        cache_type_k=setup.cache_type_k,
        cache_type_v=setup.cache_type_v,
        device=settings.device,
        prefix_cache=False,
        name_bus_errors=True,
    )
    with ProgressBar() as bar:
        async with open_engine(config, bar) as engine:
            facts = machine_facts(engine)
            sequence = ForwardPass(engine.executor)
            for test in wanted:
                result = Result(
                    setup, test, facts, test_time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                )
                await measure(sequence, settings, result, bar)
                bar.finish()
                report.add(result)


async def measure(
    sequence: ForwardPass, settings: argparse.Namespace, result: Result, progress: Progress
) -> None:
    """Fill `result` with the times of its repetitions."""
    import numpy as np

    test = result.test
    random = np.random.default_rng(SEED)
    tokens = random.integers(0, sequence.n_vocab, max(test.n_ctx, 1)).tolist()
    progress.start(test.name, total=settings.repetitions + 1, unit="run")
    if not settings.no_warmup:
        sequence.rewind()
        await pass_through(sequence, tokens, test.n_prompt, min(test.n_gen, 1))
    sequence.rewind()
    await sequence.prefill(tokens[: test.n_depth])
    progress.advance()
    for _ in range(settings.repetitions):
        sequence.rewind(test.n_depth)
        start = time.perf_counter_ns()
        await pass_through(sequence, tokens[test.n_depth :], test.n_prompt, test.n_gen)
        result.samples_ns.append(max(time.perf_counter_ns() - start, 1))
        progress.advance()


async def pass_through(sequence: ForwardPass, tokens: list[int], n_prompt: int, n_gen: int) -> None:
    """Read `n_prompt` tokens, the last one with logits, then decode `n_gen` one by one."""
    if n_prompt:
        await sequence.prefill(tokens[:n_prompt], range(n_prompt - 1, n_prompt))
    for token in tokens[n_prompt : n_prompt + n_gen]:
        await sequence.decode(token)


def machine_facts(engine: Engine) -> Row:
    """llama-bench's keys that the engine decides."""
    from runtime.commands import program_version
    from runtime.commands.machine import cpu_name
    from runtime.models.model_type import model_type

    model, executor = engine.model, engine.executor.describe()
    return {
        "build_commit": program_version(),
        "cpu_info": cpu_name(),
        "gpu_info": "",
        "backends": str(executor.get("device", "cpu")).upper(),
        "model_filename": str(model.path or ""),
        "model_type": model_type(model.architecture, model.metadata, model.file_type),
        "model_size": model.n_bytes,
        "model_n_params": model.n_params,
        "n_threads": executor.get("n_threads", executor.get("threads", 1)),
    }
