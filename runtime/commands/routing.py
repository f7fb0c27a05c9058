"""Record which experts a text uses: OUT is a trace for `python -m bench routing`.

The text is read as prompts of the context's size, or, from the K-th token of each on, as if it were
generated, token by token. Several texts become several sequences.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import add_model_options, engine_config, whole_number
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from profiles import RoutingTrace
    from runtime.commands.forward import ForwardPass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", action="append", required=True, metavar="TEXT",
        help="UTF-8 text file; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="OUT", help="file to write")
    parser.add_argument(
        "-c", "--ctx-size", type=whole_number(4), default=512, metavar="N",
        help="tokens of a sequence (default 512)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=whole_number(1), default=4096, metavar="N",
        help="tokens of each text at most (default 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--split", type=whole_number(0), metavar="K",
        help="compute the first K tokens of a sequence together and the others one by one",
    )  # fmt: skip
    add_model_options(parser)


def run(settings: argparse.Namespace) -> int:
    from profiles import ProfileError, save_trace

    texts = [text_of(Path(name)) for name in settings.file]
    path = Path(settings.out)
    try:
        trace = asyncio.run(record(settings, texts))
        save_trace(path, trace)
    except ProfileError as error:
        raise ConfigError(f"nothing to record: {error}") from error
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from error
    print(
        f"{path}: {trace.n_tokens} tokens of {int(trace.sequences.max(initial=-1)) + 1} sequences, "
        f"{trace.n_layers} layers, {trace.n_used} of {max(trace.n_expert)} experts a token, "
        f"{path.stat().st_size} bytes"
    )
    return 0


async def record(settings: argparse.Namespace, texts: list[str]) -> RoutingTrace:
    """The routing of all texts.  Raises: ConfigError, ProfileError."""
    from runtime import ProgressBar, open_engine
    from runtime.commands.forward import ForwardPass, chunks
    from runtime.experts.recording import RecordedExecutor, recorder_for
    from runtime.models.model import open_model

    config = engine_config(settings, n_ctx=settings.ctx_size, n_parallel=1, prefix_cache=False)
    with open_model(config.model_path) as model, ProgressBar() as bar:
        async with open_engine(config, bar) as engine:
            executor = engine.executor
            if not isinstance(executor, RecordedExecutor):
                raise ConfigError(f"--device {settings.device}: its routing cannot be recorded")
            name = config.model_path.name
            recorder = recorder_for(model, name, engine.executor.limits.page_tokens)
            executor.recorder = recorder
            sequence = ForwardPass(engine.executor)
            for text in texts:
                tokens = await engine.tokenize(text, add_special=True, parse_special=False)
                tokens = tokens[: settings.tokens]
                bar.start("routing", total=len(tokens), unit="tok")
                for chunk in chunks(len(tokens), settings.ctx_size):
                    await compute(sequence, tokens[chunk.start : chunk.stop], settings.split)
                    bar.advance(len(chunk))
            return recorder.trace()


async def compute(sequence: ForwardPass, tokens: list[int], split: int | None) -> None:
    """One sequence from its start; all tokens are outputs, or the last layer would skip some."""
    n_together = len(tokens) if split is None else min(split, len(tokens))
    sequence.rewind()
    await sequence.prefill(tokens[:n_together], range(n_together))
    for token in tokens[n_together:]:
        await sequence.decode(token)


def text_of(path: Path) -> str:
    """Raises: ConfigError."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror}") from error
