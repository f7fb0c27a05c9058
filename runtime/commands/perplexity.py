"""Measure how well a model predicts a text, by llama-perplexity's procedure.

The text is cut into chunks of the context size; each starts with the model's BOS if it uses one,
and only the predictions in a chunk's second half count.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import (
    add_cache_options,
    add_model_options,
    engine_config,
    whole_number,
)
from runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.commands.forward import ForwardPass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="UTF-8 text file")
    parser.add_argument(
        "-c", "--ctx-size", type=whole_number(4), default=512, metavar="N",
        help="tokens of a chunk (default 512)",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=whole_number(-1), default=-1, metavar="N",
        help="chunks to compute; -1: all (default)",
    )  # fmt: skip
    add_cache_options(parser)
    add_model_options(parser)


@dataclass
class Estimate:
    """Sums over the predictions so far: their number, surprise in nats, and its square."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, surprises: NDArray[np.float64]) -> None:
        self.count += len(surprises)
        self.total += float(surprises.sum())
        self.squares += float((surprises * surprises).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.total / self.count)

    @property
    def deviation(self) -> float:
        """Standard error of the perplexity."""
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0)
        return math.sqrt(variance / max(self.count - 1, 1)) * self.perplexity


def run(settings: argparse.Namespace) -> int:
    path = Path(settings.file)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror}") from error
    estimate = asyncio.run(measure(settings, text))
    print(
        f"\nFinal estimate: PPL = {estimate.perplexity:.4f} +/- {estimate.deviation:.5f}",
        flush=True,
    )
    return 0


async def measure(settings: argparse.Namespace, text: str) -> Estimate:
    """Print a running value per chunk; returns the last."""
    from runtime import ProgressBar, open_engine
    from runtime.commands.forward import ForwardPass

    config = engine_config(
        settings,
        n_ctx=settings.ctx_size,
        n_parallel=1,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        prefix_cache=False,
    )
    with ProgressBar() as bar:
        async with open_engine(config, bar) as engine:
            tokens = await engine.tokenize(text, add_special=True, parse_special=False)
            n_chunks = count_chunks(len(tokens), settings.ctx_size, settings.chunks)
            # Each chunk's first token becomes the BOS, if the model begins texts with one.
            bos = engine.tokenizer.bos_id if engine.tokenizer.add_bos else None
            sequence, estimate = ForwardPass(engine.executor), Estimate()
            bar.finish("perplexity")
            for chunk in range(n_chunks):
                start = chunk * settings.ctx_size
                part = tokens[start : start + settings.ctx_size]
                estimate.add(await surprises(sequence, part, bos))
                print(f"[{chunk + 1}]{estimate.perplexity:.4f}", end=",", flush=True)
            return estimate


def count_chunks(n_tokens: int, n_ctx: int, wanted: int) -> int:
    """Raises: ConfigError for a text that is shorter than two chunks."""
    if n_tokens < 2 * n_ctx or wanted == 0:
        raise ConfigError(
            f"the text has {n_tokens} tokens; a context of {n_ctx} needs at least {2 * n_ctx}: use "
            "a longer text or a smaller --ctx-size, and at least one chunk"
        )
    n_whole = n_tokens // n_ctx
    return n_whole if wanted < 0 else min(wanted, n_whole)


async def surprises(
    sequence: ForwardPass, tokens: list[int], bos: int | None
) -> NDArray[np.float64]:
    """-ln p of each token after the first of the second half, f64[n - n//2 - 1]."""
    import numpy as np

    first, last = len(tokens) // 2, len(tokens) - 1
    inputs = tokens if bos is None else [bos, *tokens[1:]]
    sequence.rewind()
    parts = []
    for indices, logits in await sequence.prefill(inputs, range(first, last)):
        targets = tokens[indices.start + 1 : indices.stop + 1]
        parts.append(negative_log_probabilities(logits, targets))
    return np.concatenate(parts)


def negative_log_probabilities(
    logits: NDArray[np.float32], targets: list[int]
) -> NDArray[np.float64]:
    """-ln softmax(logits[i])[targets[i]] in f64, row by row to stay small."""
    import numpy as np

    found = np.empty(len(targets))
    for i, target in enumerate(targets):
        row = logits[i].astype(np.float64)
        top = row.max()
        found[i] = top + math.log(np.exp(row - top).sum()) - row[target]
    return found
