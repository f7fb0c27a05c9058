"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

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


def test_an_unwritable_place_gives_a_temporary_one_and_the_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    used = cache.use_directory(blocked)
    assert used.directory.is_dir() and blocked not in used.directory.parents
    assert str(blocked) in used.reason


def test_only_the_most_recent_directories_are_kept(tmp_path: Path) -> None:
    names = [f"{i:016x}" for i in range(12)]
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "something-else").mkdir()
    used = cache.use_directory(tmp_path).directory.name
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {used, "something-else", *names[: cache.KEPT_DIRECTORIES - 1]}
