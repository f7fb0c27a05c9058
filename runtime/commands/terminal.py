"""The terminal of a chat: lines from standard input without blocking the loop, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

PIECE = 1 << 16

Result = TypeVar("Result")


class LineReader:
    """Lines of standard input.  The terminal itself edits them; a pipe or a file works as well."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._buffer = b""
        self._ended = False

    async def line(self) -> str | None:
        """The next line without its end; None after the last one."""
        while b"\n" not in self._buffer and not self._ended:
            await self._readable()
            piece = os.read(self._fd, PIECE)
            self._buffer += piece
            self._ended = not piece
        head, found, rest = self._buffer.partition(b"\n")
        if not found and not head:
            return None
        self._buffer = rest
        return head.decode("utf-8", errors="replace").rstrip("\r")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except (OSError, PermissionError):
            return  # a regular file is always readable and cannot be watched
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)


@contextmanager
def on_interrupt(action: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `action` on the loop while the block runs."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, action)
    except (RuntimeError, ValueError):
        yield  # not the main thread: signals go elsewhere
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)


async def stoppable(work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` returns, or None where Ctrl-C stopped it (and nothing else)."""
    task = asyncio.ensure_future(work)
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        task.cancel()

    with on_interrupt(stop):
        try:
            return await task
        except asyncio.CancelledError:
            if not is_stopped:
                raise
            return None


def is_terminal() -> bool:
    """Whether somebody can type."""
    return sys.stdin is not None and sys.stdin.isatty()


def show(text: str) -> None:
    """Print a piece of an answer at once."""
    print(text, end="", flush=True)


def note(text: str, end: str = "\n") -> None:
    """Say something that is not part of an answer: to standard error."""
    print(text, end=end, file=sys.stderr, flush=True)
