"""SIGKILL at any moment leaves the old file or the new one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from profiles import ModelIdentity, UsageProfile, load_profile, save_profile

N_KILLS = 25
MODEL = ModelIdentity("olmoe", 1000, "0123456789abcdef" * 2)
SHAPE = 48, 128


def save_for_ever(path: Path, first: int) -> None:
    """One profile after another, each of one number only."""
    for n in range(first, 1 << 30):
        save_profile(path, UsageProfile(MODEL, np.full(SHAPE, n, np.uint64), n))


def test_a_profile_survives_its_killed_writers(tmp_path: Path) -> None:
    path, seen = tmp_path / "usage", [1]
    save_profile(path, UsageProfile(MODEL, np.full(SHAPE, 1, np.uint64), 1))
    for kill in range(N_KILLS):
        writer = os.fork()
        if writer == 0:
            try:
                save_for_ever(path, seen[-1] + 1)
            finally:
                os._exit(1)
        before, began = path.stat().st_ino, time.perf_counter()
        until = began + 1e-3 * (1 + kill * 7 % 10)
        while time.perf_counter() < until:
            pass
        while kill % 10 == 9 and path.stat().st_ino == before:  # on a busy machine, too
            assert time.perf_counter() < began + 20.0
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        found = load_profile(path)
        assert (found.counts == found.n_tokens).all() and found.n_tokens >= seen[-1]
        seen.append(found.n_tokens)
    assert seen[-1] > 1, "no writer ever came to the end of a file"
    left = [file for file in tmp_path.iterdir() if file != path]
    assert len(left) <= N_KILLS and all(file.name.endswith(".tmp") for file in left)
