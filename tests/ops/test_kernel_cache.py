"""Where compiled kernels are kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from ops.cpu import cache


@pytest.fixture(autouse=True)
def restored_directory() -> Iterator[None]:
    before = numba.config.CACHE_DIR
    yield
    numba.config.CACHE_DIR = before


def test_each_state_of_the_sources_has_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.use_directory(tmp_path)
    assert first == cache.KernelCache(tmp_path / cache.source_hash(), "")
    assert str(first.directory) == numba.config.CACHE_DIR

    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.py").write_text("one = 1\n")
    monkeypatch.setattr(cache, "SOURCES", sources)
    one = cache.use_directory(tmp_path).directory
    (sources / "kernel.py").write_text("one = 2\n")
    two = cache.use_directory(tmp_path).directory
    assert len({first.directory, one, two}) == 3
    for folder, directory in (("gpu", two), ("cpu", None)):
        (sources / folder).mkdir()
        (sources / folder / "kernel.py").write_text("three = 3\n")
        assert (cache.use_directory(tmp_path).directory == two) == (directory == two), folder


def test_a_user_without_a_home_still_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    used = cache.use_directory()
    assert used.directory.is_dir()
    assert "no home folder" in used.reason


def test_an_unwritable_place_gives_a_temporary_one_and_the_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    used = cache.use_directory(blocked)
    assert used.directory.is_dir() and blocked not in used.directory.parents
    assert str(blocked) in used.reason


def kernel_files(directory: Path) -> Any:
    numba.config.CACHE_DIR = str(directory)
    assert caching.IndexDataCacheFile is cache.KernelFiles
    (directory / "ops-cpu").mkdir(exist_ok=True)
    return cache.KernelFiles(str(directory / "ops-cpu"), "kernel", "stamp")


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_a_damaged_file_costs_a_compilation(
    tmp_path: Path, ending: str, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache._warn_once.cache_clear()
    files = kernel_files(tmp_path)
    files.save("key", list(range(1000)))
    assert files.load("key") == list(range(1000))
    [path] = tmp_path.rglob(f"*.{ending}")
    path.write_bytes(path.read_bytes()[:left])
    assert files.load("key") is None
    assert files.load("key") is None
    assert caplog.text.count("is damaged") == 1
    files.save("key", [1])
    assert files.load("key") == [1]


def test_a_full_disk_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: object, path: str) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache._warn_once.cache_clear()
    files = kernel_files(tmp_path)
    monkeypatch.setattr(cache.KernelFiles, "_open_for_write", full)
    files.save("key", [1])
    files.save("key 2", [1])
    assert files.load("key") is None
    assert caplog.text.count("No space left") == 1


def test_files_of_others_are_left_to_numba(tmp_path: Path) -> None:
    files = kernel_files(tmp_path)
    files.save("key", [1])
    numba.config.CACHE_DIR = str(tmp_path / "elsewhere")
    [path] = tmp_path.rglob("*.nbi")
    path.write_bytes(b"")
    with pytest.raises(EOFError):
        files.load("key")


def test_only_the_most_recent_directories_are_kept(tmp_path: Path) -> None:
    names = [f"{i:016x}" for i in range(12)]
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "something-else").mkdir()
    used = cache.use_directory(tmp_path).directory.name
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {used, "something-else", *names[: cache.KEPT_DIRECTORIES - 1]}


LOADING = """
import sys, numba
from ops.cpu import norm, walk
address = norm.quantize.address
print(norm.quantize._compiled.cache_hits, "numba.np.linalg" in sys.modules)
numba.njit(lambda x: x + 1)(1)
print("numba.np.linalg" in sys.modules)
"""


def test_compiled_kernels_are_loaded_without_all_that_numba_can_compile() -> None:
    command = [sys.executable, "-c", LOADING]
    subprocess.run(command, check=True, capture_output=True)  # where they are not compiled yet
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.split("\n")[:2] == ["1 False", "True"], "other functions' compiler reads it"
