"""Compute the raw logits of given tokens and save them as NumPy arrays, for comparing engines.

OUT.npz holds `tokens` i32[n] and `logits` f32[n, n_vocab]; the KV cache is f32.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import add_model_options, engine_config, whole_number
from runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=token_ids, required=True, metavar="1,2,3", help="token ids, or @FILE"
    )
    parser.add_argument("--out", required=True, metavar="OUT.npz", help="file to write")
    parser.add_argument(
        "--split", type=whole_number(0), metavar="K",
        help="compute the first K tokens together and the others one by one",
    )  # fmt: skip
    add_model_options(parser)


def token_ids(text: str) -> list[int]:
    """`1,2,3`, or the numbers in the file named after `@`."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise argparse.ArgumentTypeError("use whole numbers with commas between them")
    return [int(word) for word in words]


def run(settings: argparse.Namespace) -> int:
    import numpy as np

    tokens = settings.tokens
    n_together = len(tokens) if settings.split is None else settings.split
    if n_together > len(tokens):
        raise argparse.ArgumentError(
            None, f"argument --split: {n_together} is more than the {len(tokens)} of --tokens"
        )
    logits = asyncio.run(compute(settings, tokens, n_together))
    path = Path(settings.out)
    try:
        with path.open("wb") as file:
            np.savez(file, tokens=np.array(tokens, dtype=np.int32), logits=logits)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from error
    print(f"{path}: logits f32[{logits.shape[0]}, {logits.shape[1]}]")
    return 0


async def compute(
    settings: argparse.Namespace, tokens: list[int], n_together: int
) -> NDArray[np.float32]:
    """f32[n, n_vocab]: the first `n_together` tokens as a prompt, the others decoded one by one."""
    import numpy as np

    from runtime import ProgressBar, open_engine
    from runtime.commands.forward import ForwardPass, chunks

    config = engine_config(
        settings,
        n_ctx=max(len(tokens), 2),
        n_parallel=1,
        cache_type_k="f32",
        cache_type_v="f32",
        prefix_cache=False,
    )
    with ProgressBar() as bar:
        async with open_engine(config, bar) as engine:
            sequence = ForwardPass(engine.executor)
            check_tokens(tokens, sequence.n_vocab)
            logits = np.empty((len(tokens), sequence.n_vocab), dtype=np.float32)
            bar.start("logits", total=len(tokens), unit="tok")
            for chunk in chunks(n_together, engine.executor.limits.max_step_tokens):
                part = tokens[chunk.start : chunk.stop]
                for indices, rows in await sequence.prefill(part, range(len(part))):
                    start = chunk.start + indices.start
                    logits[start : start + len(indices)] = rows
                bar.advance(len(part))
            for index in range(n_together, len(tokens)):
                logits[index] = await sequence.decode(tokens[index])
                bar.advance()
            return logits


def check_tokens(tokens: list[int], n_vocab: int) -> None:
    """Raises: ConfigError for an id outside the vocabulary."""
    if max(tokens) >= n_vocab:
        raise ConfigError(f"--tokens: {max(tokens)} is outside the vocabulary of {n_vocab}")
