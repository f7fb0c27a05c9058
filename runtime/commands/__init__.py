"""The `hotexpert` program: one file per subcommand, each imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from runtime.commands.options import CommandParser, settle_model
from runtime.errors import EngineError

COMMANDS = {
    "serve": "HTTP server: OpenAI's API and llama-server's own",
    "run": "chat in the terminal, or complete one prompt",
    "inspect": "what a model file holds, and what fits where",
    "plan": "what a model would take and how it would run, here or elsewhere",
    "bench": "prompt and generation speed, as llama-bench measures it",
    "perplexity": "how well a model predicts a text, as llama-perplexity measures it",
    "logits": "the raw logits of given tokens, for comparing engines",
    "routing": "record which experts a text uses, for `python -m bench routing`",
    "profile": "show, export, import or merge how often a model's experts were used",
    "trace": "where the time went, by a trace of GGML_SCHED_PROF=FILE.json",
}
OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0, 1 (an error, in one line), 2 (wrong usage)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return OK if words else WRONG_USAGE
    if words[0] == "--version":
        print(f"hotexpert {program_version()}")
        return OK
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(
            f"hotexpert: unknown command {name!r}; use one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return WRONG_USAGE
    try:
        return run_command(name, rest)
    except EngineError as error:
        print(f"hotexpert {name}: {error}", file=sys.stderr, flush=True)
        leave_threads_behind(FAILED)
        return FAILED
    except BrokenPipeError:
        # The reader has seen enough (`hotexpert inspect | head`); nothing more can be printed.
        sys.stderr.close()
        return FAILED
    except OSError as error:  # a full disk behind `hotexpert inspect > FILE`, for one
        print(f"hotexpert {name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr, flush=True)
        leave_threads_behind(INTERRUPTED)
        return INTERRUPTED


def leave_threads_behind(status: int) -> None:
    """End the process here where a cancelled load still compiles, or a closing waits for what does
    not end; else return."""
    from runtime.engine.opening import left_behind

    if left_behind():
        os._exit(status)


def run_command(name: str, words: Sequence[str]) -> int:
    """Parse `words` as the arguments of subcommand `name` and run it."""
    module = importlib.import_module(f"runtime.commands.{name}")
    if hasattr(module, "take_over"):
        return int(module.take_over(words))
    parser = CommandParser(
        prog=f"hotexpert {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        settings = parser.parse_args(words)
    except SystemExit as end:  # after --help, or a message that names the argument
        return end.code if isinstance(end.code, int) else WRONG_USAGE
    try:
        settle_model(settings)
        return int(module.run(settings))
    except argparse.ArgumentError as error:  # arguments that do not go together
        sys.stderr.write(parser.complaint(str(error)))
        return WRONG_USAGE


def overview() -> str:
    """The page of `hotexpert --help`."""
    lines = [
        "usage: hotexpert COMMAND [options]",
        "",
        "Runs GGUF language models, above all Mixture-of-Experts models. Without a model named,",
        "a bundled demonstration model answers: for trying out, not for its answers.",
        "",
        *(f"  {name:12}{what}" for name, what in COMMANDS.items()),
        "",
        "hotexpert COMMAND --help lists a command's options.",
    ]
    return "\n".join(lines)


def program_version() -> str:
    try:
        return version("hotexpert")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
