"""Closing what may never let go: on a thread that nobody has to wait for.

A CPU worker inside a call that does not return, or a GPU that does not end its work, would hold up
whoever closes for ever. The thread is a daemon: it goes on waiting, and a program can end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from runtime.errors import CloseStalled

CLOSING_SECONDS = 10.0
"""Without a sign of life for so long nobody waits any more."""

THREAD_NAME = "engine closing"
LEFT_NAME = "engine closing that nobody waits for"


async def close_within(close: Callable[[], None], seconds: float = CLOSING_SECONDS) -> None:
    """Run `close` on a thread of its own; a cancelled caller leaves it running.

    Raises: CloseStalled where it has not returned after so long: what it holds is not given back,
    and must not be; whatever `close` raises.
    """
    closing: Future[None] = Future()
    thread = threading.Thread(target=_close, args=(close, closing), name=THREAD_NAME, daemon=True)
    thread.start()
    waiting = asyncio.wrap_future(closing)
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    if not done:
        thread.name = LEFT_NAME
        waiting.cancel()
        raise CloseStalled(seconds)
    waiting.result()


def _close(close: Callable[[], None], closing: Future[None]) -> None:
    if not closing.set_running_or_notify_cancel():
        return
    try:
        close()
    except BaseException as error:
        closing.set_exception(error)
    else:
        closing.set_result(None)
