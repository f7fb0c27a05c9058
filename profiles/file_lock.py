"""A lock that several writers of one file share, also of several processes."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Inside, nobody else is who asks for the same file, by whatever link.  Blocks until it is so.

    The lock is a file beside it, which stays; a writer that is killed gives it back. Where it
    cannot be had, because of the folder or the file system, the work is done without.
    Raises: OSError where the folder cannot be made.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / f".{path.name}.lock"
    try:
        held = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.info("%s: no lock: %s", beside, error.strerror)
        yield
        return
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("%s: no lock: %s", beside, error.strerror)
        yield
    finally:
        os.close(held)
