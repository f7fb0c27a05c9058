"""CPU workers on bad days, on this machine's GPU: a typed error in time, and right tokens after it.

    python -m tests.support.watchdog MODEL.gguf [--out result.json]

A worker takes a chunk of a missed expert and is late by less than the GPU's patience; or by more;
or leaves its chunk undone, as one that raised or died would. The tests of the fake driver say the
same of each (tests/engine/test_gpu_bad_days.py), with a GPU whose patience they choose. 1 where an
answer is wrong, an error is another one, or something takes longer than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.machine import machine
from ops.gpu.mailbox import PATIENCE_NS
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.gpu import executor as executor_file
from runtime.engine.open_engine import open_engine
from runtime.engine.params import SamplingParams
from runtime.errors import DeviceStalled, EngineClosed, EngineError, ExchangeStalled

JOB = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Job = Callable[[int, int, int], None]

PATIENCE = PATIENCE_NS / 1e9
LATE, STALLED = 0.4 * PATIENCE, 2.5 * PATIENCE
N_TOKENS = 12
LIMIT = 60.0
"""Seconds within which whatever happens has ended."""


class Trouble:
    """Inside, the first chunk of the serving jobs of a layer goes another way than the others."""

    def __init__(self, engine: Engine, layer: int, first: Callable[[Job, int, int, int], None]):
        exchange: Any = engine.executor._parts.exchange  # type: ignore[attr-defined]
        self._programs = [serve.program for serve in exchange._serves]
        self._at = self._programs[0].names.index(f"{layer}.serve")
        self._function = int(self._programs[0]._jobs["function"][self._at])
        usual: Job = JOB(self._function)
        self.n_chunks = 0

        def chunk(args: int, index: int, worker: int) -> None:
            self.n_chunks += 1
            (first if self.n_chunks == 1 else lambda job, *rest: job(*rest))(
                usual, args, index, worker
            )

        self._replaced = JOB(chunk)

    def _use(self, function: int) -> None:
        for program in self._programs:
            program._jobs["function"][self._at] = function

    def __enter__(self) -> Trouble:
        self._use(ctypes.cast(self._replaced, ctypes.c_void_p).value or 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._use(self._function)


def late_by(seconds: float) -> Callable[[Job, int, int, int], None]:
    def first(usual: Job, args: int, chunk: int, worker: int) -> None:
        time.sleep(seconds)
        usual(args, chunk, worker)

    return first


def undone(_: Job, __: int, ___: int, ____: int) -> None:
    """Nobody computes it."""


async def tokens_of(engine: Engine) -> list[int | None]:
    params = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
    async with asyncio.timeout(LIMIT):
        return [t.id async for t in engine.generate([5, 70, 11], params, reuse_prefix=False)]


async def outcome(engine: Engine) -> tuple[str, list[int | None], float]:
    """The class of the error, "" for none; the tokens; how long it took."""
    began = time.perf_counter()
    try:
        return "", await tokens_of(engine), time.perf_counter() - began
    except (EngineError, TimeoutError) as error:
        return type(error).__name__, [], time.perf_counter() - began


@contextmanager
def ending() -> Iterator[None]:
    """Say with which error an engine has ended, if it has."""
    try:
        yield
    except EngineError as error:
        sys.stdout.write(f"the engine ended: {type(error).__name__}\n")


async def on_this_machine(config: EngineConfig) -> list[dict[str, Any]]:
    """What happened in each case; `wrong` says what should not have."""
    rows: list[dict[str, Any]] = []

    def told(
        case: str, found: tuple[str, list[int | None], float], errors: tuple[type, ...]
    ) -> None:
        error, tokens, seconds = found
        names = [kind.__name__ for kind in errors]
        expected = rows[0]["tokens"] if rows else tokens
        fits = error in names if names else not error and tokens == expected
        wrong = "" if fits else f"expected {names or 'the tokens of the first run'}"
        row = {"case": case, "error": error, "tokens": tokens, "seconds": round(seconds, 3)}
        rows.append({**row, "wrong": wrong})
        sys.stdout.write(f"{case}: {error or 'no error'}, {seconds:.2f} s {wrong}\n")
        sys.stdout.flush()

    with ending():
        async with open_engine(config) as engine:
            told("first run", await outcome(engine), ())
            with Trouble(engine, 0, late_by(LATE)):
                told(f"a worker is late by {LATE} s", await outcome(engine), ())
            with Trouble(engine, 0, late_by(STALLED)):
                told(f"a worker stalls {STALLED} s", await outcome(engine), (ExchangeStalled,))
            told("the next request", await outcome(engine), ())
    with ending(), mock.patch.object(executor_file, "LATE_WORKER_SECONDS", 1.0):
        async with open_engine(config) as engine:
            told("another engine", await outcome(engine), ())
            with Trouble(engine, 0, undone):
                errors = (ExchangeStalled, DeviceStalled, EngineClosed)
                told("a chunk is never computed", await outcome(engine), errors)
    async with open_engine(config) as engine:
        told("opened again", await outcome(engine), ())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.watchdog")
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=int, default=4, help="experts of a layer in VRAM")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, device="cuda", moe_expert_cache=args.cache, n_ctx=512, n_parallel=1
    )
    rows = asyncio.run(on_this_machine(config))
    if args.out:
        report = {"machine": machine(), "settings": {k: str(v) for k, v in vars(args).items()}}
        args.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
