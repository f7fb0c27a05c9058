"""A mapped file that is cut ends the process with one line naming it, whichever thread reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops.cpu.sigbus import EXIT_STATUS

PROGRAM = """
import mmap, os, sys, threading
import numpy as np
from ops.cpu.sigbus import named_bus_errors

files = []
for path in sys.argv[1:3]:
    with open(path, "rb") as file:
        files.append(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))
watched = [(sys.argv[1], files[0].ctypes.data, files[0].nbytes)]
mode, victim = sys.argv[3], int(sys.argv[4])
if mode == "two":
    second = named_bus_errors([(sys.argv[2], files[1].ctypes.data, files[1].nbytes)])
with named_bus_errors(watched):
    if mode == "two":
        second.__enter__()
    if mode == "thread":
        os.truncate(sys.argv[1 + victim], 0)
        thread = threading.Thread(target=files[victim].sum)
        thread.start()
        thread.join()
    elif mode == "main":
        os.truncate(sys.argv[1 + victim], 0)
        files[victim].sum()
if mode in ("after", "two"):
    os.truncate(sys.argv[1 + victim], 0)
    files[victim].sum()
print("survived")
"""


def run(tmp_path: Path, mode: str, victim: int) -> subprocess.CompletedProcess[str]:
    paths = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for path in paths:
        path.write_bytes(bytes(1 << 16))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, paths), mode, str(victim)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("mode", ["main", "thread"])
def test_a_watched_file(mode: str, tmp_path: Path) -> None:
    ended = run(tmp_path, mode, victim=0)
    assert ended.returncode == EXIT_STATUS
    assert ended.stderr.splitlines() == [
        f"{tmp_path}/first.gguf: the file was cut short or cannot be read any more; start again"
    ]


@pytest.mark.parametrize("mode, victim", [("main", 1), ("after", 0)])
def test_other_bus_errors_stay_what_they_were(mode: str, victim: int, tmp_path: Path) -> None:
    ended = run(tmp_path, mode, victim)
    assert ended.returncode == -7
    assert ended.stderr == ""


def test_one_block_may_outlive_another(tmp_path: Path) -> None:
    for victim, said in ((1, "second.gguf: the file was cut"), (0, "")):
        ended = run(tmp_path, "two", victim)
        assert ended.returncode == (EXIT_STATUS if said else -7)
        assert said in ended.stderr


def test_nothing_happens_without_a_fault(tmp_path: Path) -> None:
    ended = run(tmp_path, "none", victim=0)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "survived\n", "")
