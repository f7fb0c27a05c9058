"""Opening an engine's model and executor on a thread that nobody has to wait for.

Compiling kernels takes many seconds inside a compiler that cannot be interrupted.  The thread is a
daemon: a caller that stops waiting goes on at once, and the thread cleans up behind itself.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from concurrent.futures import Future

from runtime.config import EngineConfig
from runtime.engine import closing
from runtime.engine.placement import Opened, open_placed
from runtime.progress import Progress

THREAD_NAME = "engine opening"
ENDED_NAME = "engine opened"
"""Of the thread when nobody has to leave it behind: it only has to tell."""

TURN_SECONDS = 2e-4
"""How long a thread computes while others wait for the interpreter: imports would otherwise hold up
each of the ten thousand calls that move weights by 5 ms."""

OBJECTS_A_LOOK = 200_000
"""New objects between looks for garbage, instead of some hundreds."""


async def open_off_loop(config: EngineConfig, progress: Progress) -> Opened:
    """`open_placed` on its own thread.  A cancelled caller leaves at once: the thread stops at its
    next piece of progress and closes what it has opened.

    Raises: ConfigError, ModelError, DeviceError.
    """
    opening: Future[Opened] = Future()
    threading.Thread(
        target=_open, args=(config, progress, opening), name=THREAD_NAME, daemon=True
    ).start()
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        progress.cancel()
        if not opening.cancel() and opening.exception() is None:
            await opening.result().close()  # it had ended, and nobody has taken the result
        raise


def left_behind() -> bool:
    """Whether a cancelled opening, or a closing that nobody waits for, still runs.

    A main program then ends by `os._exit`: the interpreter's own end would pull the compiler's
    memory away from under it, or wait.
    """
    names = {thread.name for thread in threading.enumerate()}
    return not names.isdisjoint((THREAD_NAME, closing.LEFT_NAME))


def _open(config: EngineConfig, progress: Progress, opening: Future[Opened]) -> None:
    try:
        with _UNDISTURBED:
            opened = open_placed(config, progress)
    except BaseException as error:
        if opening.set_running_or_notify_cancel():
            threading.current_thread().name = ENDED_NAME
            opening.set_exception(error)
        return
    if opening.set_running_or_notify_cancel():
        threading.current_thread().name = ENDED_NAME
        opening.set_result(opened)
    else:
        asyncio.run(opened.close())


class _Undisturbed:
    """While any engine opens, threads take turns more often than usual, and garbage is looked for
    less often: next to nothing that an opening makes is any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_openings = 0
        self._usual_turn, self._usual_looks = 0.0, gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if self._n_openings == 0:
                self._usual_turn, self._usual_looks = sys.getswitchinterval(), gc.get_threshold()
                sys.setswitchinterval(min(self._usual_turn, TURN_SECONDS))
                first, *others = self._usual_looks
                gc.set_threshold(max(first, OBJECTS_A_LOOK) if first else 0, *others)
            self._n_openings += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_openings -= 1
            if self._n_openings == 0:
                sys.setswitchinterval(self._usual_turn)
                gc.set_threshold(*self._usual_looks)


_UNDISTURBED = _Undisturbed()
