"""What part of a token's time its bound is, where ours misses experts (see `bench.bounds`)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import runtime
from bench.bounds import serial_seconds
from bench.hybrid import read_rates_of, token_work, usage
from bench.runs import Run
from runtime.experts.totals import ON_CPU, ON_GPU
from runtime.models import open_model
from runtime.models.sizes import model_sizes

Counts = NDArray[np.float64]


def usage_of(engine: runtime.Engine) -> NDArray[np.int64] | None:
    """Who has served how many experts of each layer so far; None: all are in one place."""
    run = Run(engine.executor, 1)
    return None if run.experts() is None else usage(run)


def missed_layers(counts: Counts) -> float:
    """Layers that a token misses an expert of; counts: of a token, by layer and who served it.

    As if each of a layer's experts were missed independently of the others.
    """
    used = counts[:, ON_CPU] + counts[:, ON_GPU]
    hit = np.divide(counts[:, ON_GPU], used, out=np.ones_like(used), where=used > 0)
    return float((1 - hit**used).sum())


async def serial_share(
    engine: runtime.Engine, counts: Counts, n_keys: int, token_seconds: float
) -> dict[str, Any]:
    """T_s over the time of a token that read `n_keys` keys, and the bare reads that it is made of.

    Takes seconds: nothing else runs meanwhile.
    """
    run = Run(engine.executor, 1)
    with open_model(engine.config.model_path) as model:
        sizes = model_sizes(model.spec, model.file.tensors)
        rates = await asyncio.to_thread(read_rates_of, run, model)
    work = token_work(sizes, counts, missed_layers(counts), n_keys)
    return {
        "share_of_serial_bound": serial_seconds(work, rates) / token_seconds,
        "read_bytes_per_second": asdict(rates),
        "work": asdict(work),
    }
