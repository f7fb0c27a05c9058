"""Chat with a model in the terminal, or complete one prompt.

In a chat: /exit ends, /regen answers again, /clear forgets the conversation, /read FILE puts a
text file in front of the next message; a line that ends with \\ goes on. Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.commands.options import (
    add_cache_options,
    add_model_options,
    add_sampling_options,
    engine_config,
    sampling_params,
    whole_number,
)
from runtime.commands.terminal import LineReader, is_terminal, note, show, stoppable
from runtime.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from runtime import Engine, SamplingParams, Timings
    from runtime.commands.chat import Chat

HELP = "/exit  /regen  /clear  /read FILE   (Ctrl-C stops an answer)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="first message, or the text to complete")
    add("-f", "--file", metavar="FILE", help="read the prompt from a file")
    add("-n", "--predict", "--n-predict", type=whole_number(-1), default=-1, metavar="N",
        help="tokens of an answer at most; -1: until it ends (default)")  # fmt: skip
    add(
        "-st",
        "--single-turn",
        action="store_true",
        help="end after one answer, as a prompt does where standard input is no terminal",
    )
    add("-sys", "--system-prompt", metavar="TEXT", help="what the model is told first")
    add("--raw", action="store_true", help="complete the prompt as it is, without chat template")
    add("--no-display-prompt", action="store_true", help="with --raw: print only what is new")
    add("-r", "--reverse-prompt", action="append", default=[], metavar="TEXT",
        help="text that ends an answer; may be repeated")  # fmt: skip
    add("-c", "--ctx-size", type=whole_number(2), metavar="N",
        help="tokens of context (default: the model's, at most 8192, on a GPU 32768)")  # fmt: skip
    add("--no-show-timings", dest="show_timings", action="store_false",
        help="no line with the speed after an answer")  # fmt: skip
    add_cache_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)


def run(settings: argparse.Namespace) -> int:
    prompt = read_prompt(settings)
    if settings.raw and prompt is None:
        raise ConfigError("--raw needs a prompt: -p TEXT or -f FILE")
    if not settings.raw and prompt is None and sys.stdin is None:
        raise ConfigError("standard input is closed: give a prompt with -p TEXT or -f FILE")
    if prompt is not None and not is_terminal():
        # A script that gives a prompt wants one answer, and its own standard input left alone.
        settings.single_turn = True
    return asyncio.run(open_and_talk(settings, prompt))


def read_prompt(settings: argparse.Namespace) -> str | None:
    """Raises: ConfigError for a file that cannot be read."""
    if settings.file is None:
        return None if settings.prompt is None else str(settings.prompt)
    if settings.prompt is not None:
        raise ConfigError("give either -p or -f")
    return read_text(settings.file)


def read_text(name: str) -> str:
    try:
        return Path(name).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error


async def open_and_talk(settings: argparse.Namespace, prompt: str | None) -> int:
    from dataclasses import replace

    from runtime import ProgressBar, open_engine

    config = engine_config(
        settings,
        n_ctx=settings.ctx_size,
        n_parallel=1,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )
    with ProgressBar() as bar:
        async with open_engine(config, bar) as engine:
            bar.finish()
            params = replace(
                sampling_params(settings, engine.default_params),
                max_tokens=settings.predict,
                stop=tuple(settings.reverse_prompt),
            )
            if settings.raw:
                await complete(engine, params, str(prompt), settings)
            else:
                await Conversation(engine, params, settings).hold(prompt)
    return 0


async def complete(
    engine: Engine, params: SamplingParams, prompt: str, settings: argparse.Namespace
) -> None:
    """Print `prompt` and its continuation; Ctrl-C stops it."""
    if not settings.no_display_prompt:
        show(prompt)
    timings: Timings | None = None

    async def stream() -> None:
        nonlocal timings
        async for token in engine.generate(prompt, params):
            show(token.text)
            timings = token.timings or timings

    await stoppable(stream())
    show("\n")
    if settings.show_timings:
        note_timings(timings)


class Conversation:
    """The chat loop: reads lines, obeys commands, streams answers."""

    def __init__(
        self, engine: Engine, params: SamplingParams, settings: argparse.Namespace
    ) -> None:
        from runtime.commands.chat import Chat

        self._chat: Chat = Chat(engine, params, settings.system_prompt)
        self._settings = settings
        self._name = engine.model.name
        self._lines = LineReader()
        self._attached = ""  # files that the next message begins with

    async def hold(self, prompt: str | None) -> None:
        """Talk until the user leaves; `prompt` is the first message."""
        if prompt is not None:
            self._chat.say(prompt)
            await self._answer()
            if self._settings.single_turn:
                return
        note(f"chat with {self._name}. {HELP}")
        while (line := await self._ask()) is not None:
            if line.startswith("/"):
                if not await self._obey(line):
                    return
            elif line.strip():
                self._chat.say(self._attached + line)
                self._attached = ""
                await self._answer()
                if self._settings.single_turn:
                    return

    async def _ask(self) -> str | None:
        """One message; None when the user has left (end of input, or Ctrl-C)."""
        note("\n> ", end="")
        parts: list[str] = []
        while True:
            line = await stoppable(self._lines.line())
            if line is None:
                return "\n".join(parts) or None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    async def _obey(self, line: str) -> bool:
        """Carry out a command; False: leave."""
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return False
        if command == "/clear":
            self._chat.clear()
            self._attached = ""
            note("the conversation is forgotten")
        elif command == "/regen":
            if self._chat.drop_answer():
                await self._answer()
            else:
                note("there is no answer yet")
        elif command == "/read":
            self._attach(argument.strip())
        else:
            note(f"unknown command {command}; {HELP}")
        return True

    def _attach(self, name: str) -> None:
        try:
            text = read_text(name)
        except ConfigError as error:
            note(str(error))
            return
        self._attached += f"{text}\n\n"
        note(f"{name}: {len(text)} characters go before the next message")

    async def _answer(self) -> None:
        """Stream the next answer; a request that fails is reported and the chat goes on."""

        async def stream() -> None:
            async for text in self._chat.answer():
                show(text)

        try:
            await stoppable(stream())
        except EngineError as error:
            if self._settings.single_turn:
                raise
            note(str(error))
        show("\n")
        if self._settings.show_timings:
            note_timings(self._chat.timings)


def note_timings(timings: Timings | None) -> None:
    if timings is None:
        note("[ stopped ]")
        return
    values = timings.as_dict()
    note(
        f"[ Prompt: {values['prompt_per_second']:.1f} t/s | "
        f"Generation: {values['predicted_per_second']:.1f} t/s ]"
    )
